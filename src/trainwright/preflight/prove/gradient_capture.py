"""What a short run leaves to compare: the gradients of its first step, and how far two sets of tensors are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainwright.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from trainwright.config.protocol import Arguments
    from trainwright.state.control import TrainerControl
    from trainwright.state.trainer_state import TrainerState

Tensors = Mapping[str, torch.Tensor]


class GradientCapture(TrainerCallback):
    """Keeps the gradients of the first step, as the optimizer is about to get them."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if not self.gradients:
            named = kwargs["model"].named_parameters()
            self.gradients = {name: p.grad.detach().float().cpu() for name, p in named if p.grad is not None}


def gap(one: Tensors, other: Tensors) -> float:
    """The largest difference, as a share of the largest value; infinite where the names are not the same."""
    if one.keys() != other.keys() or not one:
        return float("inf")
    largest = max(float(value.abs().max()) for value in one.values() if value.numel())
    difference = max(float((value - other[name]).abs().max()) for name, value in one.items() if value.numel())
    return difference / largest if largest > 0 else difference


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Names of tensors that are not bit for bit the same."""
    return [name for name in one if name not in other or not torch.equal(one[name], other[name])]


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with all its dropout at 0: what it draws depends on how samples are split into batches."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = isinstance(value, float) and (
                "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
            )
            if is_rate:
                setattr(module, name, 0.0)
    return model
