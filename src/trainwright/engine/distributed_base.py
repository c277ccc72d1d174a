"""Engines of several processes: their base, with collectives and the watchdog, and DDP, the shortest of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright._types import DataLoaderLike, Optimizer
from trainwright.config.plans import DDPPlan, EnginePlan
from trainwright.distributed import collectives
from trainwright.distributed.process_group import leave_at_exit
from trainwright.distributed.watchdog import Watchdog, start_watchdog, watched
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT, Engine, MakeOptimizer
from trainwright.state.interrupts import Interrupts
from trainwright.support.model_facts import uncompiled

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
_run_numbers = itertools.count()  # the same number for the same run in all processes: all take part in each


class DistributedEngine(Engine):
    """Base of engines that train in a process group, possibly with a single process."""

    def __init__(self, plan: EnginePlan, accelerator: Accelerator) -> None:
        device = accelerator.device
        # Accelerate numbers the CPU by process, which torch takes as another device than the CPU in some operations.
        super().__init__(plan, accelerator, torch.device("cpu") if device.type == "cpu" else device)
        leave_at_exit()
        self._world_size = dist.get_world_size()
        self._num_together = 1 if plan.parallel is None else plan.parallel.num_together
        self._data_parallel_group = collectives.data_parallel_group(self._num_together)
        # Processes with tokens of their own: of the replicas, and of the parts of their sequences.
        self._token_group = self._data_parallel_group
        if plan.parallel is not None and plan.parallel.num_per_sequence > 1:
            self._token_group = collectives.data_parallel_group(plan.parallel.tp)
        self._watchdog: Watchdog | None = None

    def dispatch(self, dataloader: DataLoaderLike) -> Any:
        # A last batch that cannot be split evenly is filled up with samples of the first batch.
        from accelerate.data_loader import prepare_data_loader

        return prepare_data_loader(
            dataloader,
            self.device,
            split_batches=True,
            put_on_device=True,
            dispatch_batches=True,
            use_seedable_sampler=False,
            non_blocking=self._plan.loaders.non_blocking,
        )

    def gather(self, value: Any) -> Any:
        return collectives.gather(value, self.device, self._data_parallel_group)

    def gather_objects(self, value: T) -> list[T]:
        return collectives.gather_objects(value)

    def gather_replica_objects(self, value: T) -> list[T]:
        return collectives.gather_objects(value, self._data_parallel_group)

    def gather_counts(self, count: int) -> list[int]:
        return collectives.gather_counts(count)[:: self._num_together]

    def gather_objects_in_background(self, value: T) -> list[T]:
        return collectives.gather_objects(value, collectives.cpu_group("background"))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.total(tensor.to(self.device), self._data_parallel_group)

    def sum_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.total(tensor.to(self.device), self._token_group)

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.stacked(tensor.to(self.device), self._data_parallel_group)

    def agree(self, decide: Callable[[], T]) -> T:
        return collectives.broadcast_from_main(decide)

    @contextmanager
    def together(self, interrupts: Interrupts) -> Iterator[None]:
        if self._watchdog is not None or (self._world_size == 1 and not self._plan.hang_timeout_s):
            yield
            return
        self._watchdog = start_watchdog(hang_timeout_s=self._plan.hang_timeout_s, run=next(_run_numbers))
        if self._watchdog is None:
            yield
            return
        try:
            with watched(self._watchdog, interrupts):
                yield
        finally:
            self._watchdog = None

    def barrier(self) -> None:
        if self.accelerator.use_distributed:
            self.accelerator.wait_for_everyone()
        else:  # accelerate does not know this kind of device, and would not wait
            dist.barrier()

    @property
    def num_processes(self) -> int:
        return self._world_size

    @property
    def num_replicas(self) -> int:
        return self._world_size // self._num_together

    @property
    def replica(self) -> int:
        return dist.get_rank() // self._num_together


class DDPEngine(DistributedEngine):
    """Trains a whole model on each of several devices, one process for each."""

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan, make_accelerator(plan))
        self._wrapped: DistributedDataParallel | None = None

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        optimizer = make_optimizer(model)
        self._wrapped = None
        if not any(p.requires_grad for p in model.parameters()):
            return model, optimizer
        is_spread = len({parameter.device for parameter in model.parameters()}) > 1
        device_ids = None if self.device.type == "cpu" or is_spread else [self.device]
        handler = self.accelerator.ddp_handler
        handler.find_unused_parameters = finds_unused_parameters(self._plan.ddp, model)
        self._wrapped = DistributedDataParallel(model, device_ids=device_ids, **handler.to_kwargs())
        handler.register_comm_hook(self._wrapped)
        return self._wrapped, optimizer

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        if sync or self._wrapped is None or self._plan.ddp.sync_each_batch:
            return NO_CONTEXT
        return self._wrapped.no_sync()

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        wrapped = self._wrapped
        if wrapped is None or wrapped.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            return None
        return collectives.start_total(tensor.to(self.device), self._data_parallel_group)

    @property
    def averages_new_parameters(self) -> bool:
        return self._wrapped is None and self.num_processes == 1

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = uncompiled(model)
        return inner.module if isinstance(inner, DistributedDataParallel) else inner


def finds_unused_parameters(plan: DDPPlan, model: nn.Module) -> bool:
    """Returns True to look for parameters that a backward pass does not reach; recomputation does not allow it."""
    if plan.find_unused_parameters is not None:
        return plan.find_unused_parameters
    # transformers' own property for this is deprecated
    recomputes = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    return not (plan.recomputes_activations or recomputes)
