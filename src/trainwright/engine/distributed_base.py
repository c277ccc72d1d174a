"""Base of the engines of several processes: collectives and the watchdog. How a model is wrapped is not here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from trainwright._types import DataLoaderLike
from trainwright.config.plans import EnginePlan
from trainwright.distributed import collectives
from trainwright.distributed.process_group import leave_at_exit
from trainwright.distributed.watchdog import Watchdog, start_watchdog, watched
from trainwright.engine.base import Engine
from trainwright.state.interrupts import Interrupts

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
_run_numbers = itertools.count()  # the same number for the same run in all processes: all take part in each


class DistributedEngine(Engine):
    """Base of engines whose processes form a process group, possibly of one."""

    def __init__(self, plan: EnginePlan, accelerator: Accelerator) -> None:
        super().__init__(plan, accelerator, accelerator.device)
        leave_at_exit()
        self._world_size = dist.get_world_size()
        self._num_together = 1 if plan.parallel is None else plan.parallel.num_together
        self._data_parallel_group = collectives.data_parallel_group(self._num_together)
        self._watchdog: Watchdog | None = None

    def dispatch(self, dataloader: DataLoaderLike) -> Any:
        """Has the main process read each batch and send it to all processes, which take equal parts of it.

        What a last batch lacks for equal parts is filled with samples of the first one.
        """
        from accelerate.data_loader import prepare_data_loader

        return prepare_data_loader(
            dataloader, self.device, split_batches=True, put_on_device=True, dispatch_batches=True,
            use_seedable_sampler=False, non_blocking=self._plan.loaders.non_blocking,
        )  # fmt: skip

    def gather(self, value: Any) -> Any:
        return collectives.gather(value, self.device, self._data_parallel_group)

    def gather_objects(self, value: T) -> list[T]:
        return collectives.gather_objects(value)

    def objects_of_replicas(self, value: T) -> list[T]:
        return collectives.gather_objects(value, self._data_parallel_group)

    def gather_counts(self, count: int) -> list[int]:
        return collectives.gather_counts(count)[:: self._num_together]

    def gather_objects_in_background(self, value: T) -> list[T]:
        return collectives.gather_objects(value, collectives.background_group())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.total(tensor.to(self.device), self._data_parallel_group)

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.stacked(tensor.to(self.device), self._data_parallel_group)

    def agree(self, decide: Callable[[], T]) -> T:
        return collectives.broadcast_from_main(decide)

    @contextmanager
    def together(self, interrupts: Interrupts) -> Iterator[None]:
        if self._watchdog is not None or (self._world_size == 1 and not self._plan.hang_timeout_s):
            yield
            return
        self._watchdog = start_watchdog(
            rank=dist.get_rank(),
            num_processes=self._world_size,
            hang_timeout_s=self._plan.hang_timeout_s,
            run=next(_run_numbers),
        )
        try:
            with watched(self._watchdog, interrupts):
                yield
        finally:
            self._watchdog = None

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    @property
    def num_processes(self) -> int:
        return self._world_size

    @property
    def num_replicas(self) -> int:
        return self._world_size // self._num_together

    @property
    def replica(self) -> int:
        return dist.get_rank() // self._num_together
