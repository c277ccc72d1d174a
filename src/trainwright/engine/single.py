"""One device: CPU, CUDA, MPS. The hot path calls torch directly."""

from __future__ import annotations

import torch
from torch import nn

from trainwright._types import Optimizer
from trainwright.config.plans import EnginePlan
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import Engine, MakeOptimizer


class SingleEngine(Engine):
    """Trains in this process, on one device."""

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan, make_accelerator(plan), torch.device(plan.device))
        self._is_fp8 = plan.precision.mixed == "fp8"

    @property
    def trains_bare(self) -> bool:
        return not self._is_fp8  # which exchanges layers at setup

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        optimizer = make_optimizer(model)
        if self._is_fp8:  # accelerate exchanges the linear layers, and the optimizer's parameters with them
            model, optimizer = self.accelerator.prepare(model, optimizer)
        return model, optimizer
