"""Updates: backward, clipping, the optimizer's step, clearing; for every engine whose optimizer is stepped here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright.engine.gradients import Gradients


class Updates:
    """What happens to gradients and weights in this process.

    Args:
        scaler: scales losses for fp16; None where nothing is scaled.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self._gradients = Gradients([])
        self._optimizer: Any = None
        self._fused_backward: Any = None

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Takes the model and the optimizer of a run."""
        self._optimizer = optimizer
        self._fused_backward = getattr(optimizer, "fused_backward", None)  # of LOMO, which updates while it goes back
        self.refresh(model)

    def refresh(self, model: nn.Module) -> None:
        self._gradients = Gradients(model.parameters())

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if self._fused_backward is not None:
            self._fused_backward(loss, self._optimizer.param_groups[0]["lr"])
            return
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer)

    def clip(self, max_norm: float) -> torch.Tensor:
        self.unscale()
        return self._gradients.clip(max_norm)

    def step(self, optimizer: Any) -> bool:
        if self.scaler is None:
            optimizer.step()
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= scale)  # the scaler lowers its scale when it skips

    def zero_grad(self) -> None:
        self._gradients.clear()


def is_out_of_memory(error: BaseException) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, torch.OutOfMemoryError) or bool(should_reduce_batch_size(error))


def empty_cache(device: torch.device) -> None:
    if device.type in ("cuda", "mps", "xpu"):
        getattr(torch, device.type).empty_cache()
