"""Several processes with whole models: gradients are averaged by torch's DistributedDataParallel.

Accelerate starts the process group and says where this process computes; the wrapped model is torch's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.config.plans import DDPPlan, EnginePlan
from trainwright.config.rendezvous import leave_at_exit
from trainwright.engine import collectives
from trainwright.engine.base import NO_CONTEXT, Engine
from trainwright.engine.compile import compiled, uncompiled
from trainwright.engine.loaders import dispatched
from trainwright.engine.precision import apply_tf32, autocast_forward
from trainwright.engine.processes import accelerator_of_several
from trainwright.engine.updates import Updates, empty_cache, is_out_of_memory
from trainwright.engine.watch import Watch, standing_watch, start_watch
from trainwright.state.interrupts import Interrupts
from trainwright.types import Prepared

T = TypeVar("T")
_runs = itertools.count()  # the same number for the same run in all processes: all take part in each


class AcceleratedEngine(Engine):
    """Trains with one whole model on each of several devices, one process for each."""

    def __init__(self, plan: EnginePlan) -> None:
        self.accelerator = accelerator_of_several(plan)
        leave_at_exit()
        self.device = self.accelerator.device
        self.non_blocking = plan.non_blocking
        self._plan = plan
        self._world_size = dist.get_world_size()
        self._watch: Watch | None = None
        self._wrapped: DistributedDataParallel | None = None
        self._updates = Updates(getattr(self.accelerator, "scaler", None))
        apply_tf32(plan.precision)

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def setup(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Any],
        make_scheduler: Callable[[Any], Any],
    ) -> Prepared:
        optimizer = make_optimizer(model)
        scheduler = make_scheduler(optimizer)
        self._wrapped = self._wrap(model)
        self._updates.begin(model, optimizer)
        running = model if self._wrapped is None else self._wrapped
        return Prepared(compiled(running, self._plan.compile), optimizer, scheduler)

    def _wrap(self, model: nn.Module) -> DistributedDataParallel | None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return None
        device_ids = None if self.device.type == "cpu" or _is_spread(model) else [self.device]
        handler = self.accelerator.ddp_handler
        handler.find_unused_parameters = finds_unused(model, self._plan.ddp)
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **handler.to_kwargs())
        handler.register_comm_hook(wrapped)
        return wrapped

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        return model

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return autocast_forward(model, self._plan.precision, self.device, keeps_outputs=keeps_outputs)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        if sync or self._wrapped is None or self._plan.ddp.sync_each_batch:
            return NO_CONTEXT
        return self._wrapped.no_sync()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._updates.backward(loss, **kwargs)

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        return self._updates.clip(max_norm)

    def step(self, optimizer: Any) -> bool:
        return self._updates.step(optimizer)

    def zero_grad(self) -> None:
        self._updates.zero_grad()

    def refresh(self, model: nn.Module) -> None:
        self._updates.refresh(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = uncompiled(model)
        return inner.module if isinstance(inner, DistributedDataParallel) else inner

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)

    def empty_cache(self) -> None:
        empty_cache(self.device)

    # -- between processes -----------------------------------------------------------------------------------------

    def dispatch(self, dataloader: Any) -> Any:
        return dispatched(dataloader, self._plan.loaders, self.device)

    def gather(self, value: Any) -> Any:
        return collectives.gather(value, self.device)

    def gather_objects(self, value: T) -> list[T]:
        return collectives.gather_objects(value)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.total(tensor.to(self.device))

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.stacked(tensor.to(self.device))

    def agree(self, decide: Callable[[], T]) -> T:
        return collectives.decided_by_main(decide)

    @contextmanager
    def together(self, interrupts: Interrupts) -> Iterator[None]:
        if self._watch is not None:
            yield
            return
        self._watch = start_watch(
            rank=dist.get_rank(),
            num_processes=self._world_size,
            hang_timeout_s=self._plan.hang_timeout_s,
            run=next(_runs),
        )
        try:
            with standing_watch(self._watch, interrupts):
                yield
        finally:
            self._watch = None

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    @property
    def num_processes(self) -> int:
        return self._world_size


def finds_unused(model: nn.Module, plan: DDPPlan) -> bool:
    """Whether to look for parameters that a step does not reach; recomputed activations do not allow it."""
    if plan.find_unused_parameters is not None:
        return plan.find_unused_parameters
    return not (plan.recomputes_activations or getattr(model, "is_gradient_checkpointing", False))


def _is_spread(model: nn.Module) -> bool:
    """Whether a model is already laid out over several devices of this process."""
    return len({parameter.device for parameter in model.parameters()}) > 1
