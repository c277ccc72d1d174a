"""What all engines of several processes share: values sent between them, and the watch. Not how a model is held."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainwright.config.plans import EnginePlan
from trainwright.distributed import collectives
from trainwright.distributed.process_group import leave_at_exit
from trainwright.distributed.watchdog import Watchdog, active_watchdog, start_watchdog
from trainwright.engine.accelerate_loader import dispatched
from trainwright.engine.base import Engine
from trainwright.engine.precision import apply_tf32
from trainwright.state.interrupts import Interrupts

T = TypeVar("T")
_runs = itertools.count()  # the same number for the same run in all processes: all take part in each


class DistributedEngine(Engine):
    """An engine whose processes form a group, possibly of one."""

    def __init__(self, plan: EnginePlan, accelerator: Any) -> None:
        self.accelerator = accelerator
        leave_at_exit()
        self.device = accelerator.device
        self.non_blocking = plan.non_blocking
        self._plan = plan
        self._world_size = dist.get_world_size()
        self._num_together = 1 if plan.parallel is None else plan.parallel.num_together
        self._peers = collectives.data_parallel_group(self._num_together)
        self._watch: Watchdog | None = None
        apply_tf32(plan.precision)

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)

    def dispatch(self, dataloader: Any) -> Any:
        return dispatched(dataloader, self._plan.loaders, self.device)

    def gather(self, value: Any) -> Any:
        return collectives.gather(value, self.device, self._peers)

    def gather_objects(self, value: T) -> list[T]:
        return collectives.gather_objects(value)

    def objects_of_replicas(self, value: T) -> list[T]:
        return collectives.gather_objects(value, self._peers)

    def gather_counts(self, count: int) -> list[int]:
        return collectives.gather_counts(count)[:: self._num_together]

    def gather_objects_in_background(self, value: T) -> list[T]:
        return collectives.gather_objects(value, collectives.background_group())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.total(tensor.to(self.device), self._peers)

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        return collectives.stacked(tensor.to(self.device), self._peers)

    def agree(self, decide: Callable[[], T]) -> T:
        return collectives.broadcast_from_main(decide)

    @contextmanager
    def together(self, interrupts: Interrupts) -> Iterator[None]:
        if self._watch is not None or (self._world_size == 1 and not self._plan.hang_timeout_s):
            yield
            return
        self._watch = start_watchdog(
            rank=dist.get_rank(),
            num_processes=self._world_size,
            hang_timeout_s=self._plan.hang_timeout_s,
            run=next(_runs),
        )
        try:
            with active_watchdog(self._watch, interrupts):
                yield
        finally:
            self._watch = None

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
