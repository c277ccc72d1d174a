"""The engines of one process that the laws are held against: one row for each that this machine can run.

Those of several processes are in `processes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.config.plans import EnginePlan, PrecisionPlan
from trainwright.engine.base import Engine
from trainwright.engine.select import select_engine

from .._support.data_parallel_double import DEVICES, two_devices


@dataclass(frozen=True)
class Backend:
    """A row.

    Attributes:
        make: makes the engine, for a kind of mixed precision.
        devices: context in which the machine has the devices of the engine.
        is_exact: whether a batch is computed as a whole, so that gradients are equal to the bit.
    """

    name: str
    make: Callable[..., Engine]
    devices: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_exact: bool = True


def single_on_cpu(mixed: str = "no", num_devices: int = 1) -> Engine:
    precision = PrecisionPlan(mixed=mixed)
    return select_engine(
        EnginePlan(device=torch.device("cpu"), use_cpu=True, num_devices=num_devices, precision=precision)
    )


def data_parallel(mixed: str = "no") -> Engine:
    return single_on_cpu(mixed, DEVICES)


BACKENDS = [
    Backend("single-cpu", single_on_cpu),
    Backend("data-parallel-double", data_parallel, devices=two_devices, is_exact=False),
]
