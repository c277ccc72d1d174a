"""One device: CPU, CUDA, MPS. The hot path goes straight to torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainwright.config.plans import EnginePlan
from trainwright.engine.base import Engine
from trainwright.engine.fp8 import fp8_accelerator
from trainwright.engine.gradients import Gradients
from trainwright.engine.precision import apply_tf32, autocast_forward
from trainwright.types import Prepared


class SingleEngine(Engine):
    """Trains in this process, on one device."""

    def __init__(self, plan: EnginePlan) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        # Accelerate keeps one state per process; a second trainer may have another precision or device.
        AcceleratorState._reset_state(reset_partial_state=True)
        mixed = plan.precision.mixed
        scales_on_cpu = mixed == "fp16" and torch.device(plan.device).type == "cpu"  # accelerate has no scaler there
        self._is_fp8 = mixed == "fp8"
        if self._is_fp8:
            self.accelerator = fp8_accelerator(cpu=plan.use_cpu)
        else:
            self.accelerator = Accelerator(mixed_precision="no" if scales_on_cpu else mixed, cpu=plan.use_cpu)
        if scales_on_cpu:
            self.accelerator.scaler = torch.amp.GradScaler("cpu")
        self.device = torch.device(plan.device)
        self.non_blocking = plan.non_blocking
        self._compile = plan.compile
        self._scaler = getattr(self.accelerator, "scaler", None)
        self._precision = plan.precision
        self._gradients = Gradients([])
        self._optimizer: Any = None
        self._fused_backward: Any = None
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
        if self._is_fp8:  # accelerate exchanges the linear layers, and the optimizer's parameters with them
            model, optimizer = self.accelerator.prepare(model, optimizer)
        scheduler = make_scheduler(optimizer)
        self._optimizer = optimizer
        self._fused_backward = getattr(optimizer, "fused_backward", None)  # of LOMO, which updates while it goes back
        self.refresh(model)
        return Prepared(self._compiled(model), optimizer, scheduler)

    def _compiled(self, model: nn.Module) -> nn.Module:
        if self._compile.backend is None:
            return model
        compiled: Any = torch.compile(model, backend=self._compile.backend, mode=self._compile.mode)
        return compiled  # type: ignore[no-any-return]

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        return model

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return autocast_forward(model, self._precision, self.device, keeps_outputs=keeps_outputs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if self._fused_backward is not None:
            self._fused_backward(loss, self._optimizer.param_groups[0]["lr"])
            return
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        return self._gradients.clip(max_norm)

    def step(self, optimizer: Any) -> bool:
        if self._scaler is None:
            optimizer.step()
            return True
        scale = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return bool(self._scaler.get_scale() >= scale)  # the scaler lowers its scale when it skips

    def zero_grad(self) -> None:
        self._gradients.clear()

    def is_out_of_memory(self, error: BaseException) -> bool:
        from accelerate.utils.memory import should_reduce_batch_size

        return isinstance(error, torch.OutOfMemoryError) or bool(should_reduce_batch_size(error))

    def empty_cache(self) -> None:
        if self.device.type in ("cuda", "mps", "xpu"):
            getattr(torch, self.device.type).empty_cache()

    def refresh(self, model: nn.Module) -> None:
        self._gradients = Gradients(model.parameters())

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner: nn.Module = getattr(model, "_orig_mod", model)
        return inner
