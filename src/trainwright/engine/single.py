"""One device: CPU, CUDA, MPS. The hot path calls torch directly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trainwright._types import Optimizer, Prepared, Scheduler
from trainwright.config.plans import EnginePlan
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import Engine


class SingleEngine(Engine):
    """Trains in this process, on one device.

    Args:
        plan: with the device, and the precision.
    """

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan, make_accelerator(plan), torch.device(plan.device))
        self._is_fp8 = plan.precision.mixed == "fp8"

    @property
    def trains_bare(self) -> bool:
        return not self._is_fp8  # which exchanges layers at setup

    def setup(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Optimizer],
        make_scheduler: Callable[[Optimizer], Scheduler],
    ) -> Prepared:
        optimizer = make_optimizer(model)
        if self._is_fp8:  # accelerate exchanges the linear layers, and the optimizer's parameters with them
            model, optimizer = self.accelerator.prepare(model, optimizer)
        scheduler = make_scheduler(optimizer)
        self._begin(model, optimizer)
        return Prepared(self._compiled(model), optimizer, scheduler)
