"""One device: CPU, CUDA, MPS. The hot path goes straight to torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainwright._types import Prepared
from trainwright.config.plans import EnginePlan
from trainwright.distributed.watchdog import watch_single_process
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import Engine
from trainwright.engine.compile import compiled, uncompiled
from trainwright.engine.precision import apply_tf32, autocast_forward
from trainwright.engine.updates import Updates
from trainwright.state.interrupts import Interrupts


class SingleEngine(Engine):
    """Trains in this process, on one device."""

    def __init__(self, plan: EnginePlan) -> None:
        self.accelerator = make_accelerator(plan)
        self._is_fp8 = plan.precision.mixed == "fp8"
        self.device = torch.device(plan.device)
        self.non_blocking = plan.non_blocking
        self._compile = plan.compile
        self._hang_timeout_s = plan.hang_timeout_s
        self._precision = plan.precision
        self._updates = Updates(getattr(self.accelerator, "scaler", None))
        apply_tf32(plan.precision)

    @property
    def trains_bare(self) -> bool:
        return not self._is_fp8  # which exchanges layers at setup

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
        if self._is_fp8:  # accelerate exchanges the linear layers, and the optimizer's parameters with them
            model, optimizer = self.accelerator.prepare(model, optimizer)
        scheduler = make_scheduler(optimizer)
        self._updates.begin(model, optimizer)
        return Prepared(compiled(model, self._compile), optimizer, scheduler)

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        return model

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return autocast_forward(model, self._precision, self.device, keeps_outputs=keeps_outputs)

    def together(self, interrupts: Interrupts) -> AbstractContextManager[None]:
        return watch_single_process(self._hang_timeout_s, interrupts)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return uncompiled(model)
