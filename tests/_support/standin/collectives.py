"""Collectives of the stand-in: those of gloo on the same memory, as the default backend of its process groups.

Each process has a device of its own, `accel:0`: torch's guard for backends in Python knows one device in a process.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.utils._pytree import tree_map

from . import streams
from .counts import COUNTS
from .device import NAME, is_here, twin_of
from .kernels import note_use

BACKEND = "standin"
# Method of a process group -> gloo's.
METHODS = {
    "allreduce": "allreduce",
    "broadcast": "broadcast",
    "allgather": "allgather",
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}


class StandinGroup(dist.ProcessGroup):
    """Passes the memory of tensors to gloo, and counts. A collective is done when it returns."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return BACKEND


def _collective(name: str, gloos: str) -> Callable[..., Any]:
    def run(self: StandinGroup, *args: Any, **kwargs: Any) -> Any:
        COUNTS.collectives[name] += 1
        stream = streams.current_stream()
        now = stream.tick()

        def twin(value: Any) -> Any:
            if not is_here(value):
                return value
            note_use(value, stream, now, writes=True, name=name)
            return twin_of(value)

        args, kwargs = tree_map(twin, given := (args, kwargs))
        getattr(self.gloo, gloos)(*args, **kwargs).wait()
        future: Future[Any] = Future()
        future.set_result(given[0][0] if given[0] else [])
        return torch._C._distributed_c10d._create_work_from_future(future)

    return run


for _name, _gloos in METHODS.items():
    setattr(StandinGroup, _name, _collective(_name, _gloos))


def register() -> None:
    """Makes it the backend of process groups between devices of this kind, once in a process."""
    dist.Backend.register_backend(BACKEND, StandinGroup, devices=[NAME])
