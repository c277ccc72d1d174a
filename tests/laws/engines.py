"""The engines that the laws are held against: one row for each backend that this machine can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainwright.config.plans import EnginePlan, PrecisionPlan
from trainwright.engine.base import Engine
from trainwright.engine.single import SingleEngine


@dataclass(frozen=True)
class Backend:
    name: str
    make: Callable[..., Engine]


def single_on_cpu(mixed: str = "no") -> Engine:
    return SingleEngine(EnginePlan(device=torch.device("cpu"), use_cpu=True, precision=PrecisionPlan(mixed=mixed)))


BACKENDS = [Backend("single-cpu", single_on_cpu)]
