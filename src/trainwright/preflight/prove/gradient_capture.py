"""Gradients of a run's first step, and differences between two sets of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from trainwright.callbacks.base import TrainerCallback
from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerControl, TrainerState

Tensors = Mapping[str, torch.Tensor]


class GradientCapture(TrainerCallback):
    """Keeps the gradients of the first step, as the optimizer is about to get them."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        if not self.gradients and model is not None:
            named = model.named_parameters()
            self.gradients = {name: p.grad.detach().float().cpu() for name, p in named if p.grad is not None}


def gap(one: Tensors, other: Tensors) -> float:
    """Returns the largest difference, as a share of the largest value; infinite where the names differ."""
    if one.keys() != other.keys() or not one:
        return float("inf")
    largest = max(float(value.abs().max()) for value in one.values() if value.numel())
    difference = max(float((value - other[name]).abs().max()) for name, value in one.items() if value.numel())
    return difference / largest if largest > 0 else difference


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Returns the names of tensors that are not bit-identical."""
    return [name for name in one if name not in other or not torch.equal(one[name], other[name])]


def without_dropout(model: nn.Module) -> nn.Module:
    """Sets all dropout of a model to 0 in place, since its draws depend on the split into batches."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = isinstance(value, float) and (
                "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
            )
            if is_rate:
                setattr(module, name, 0.0)
    return model
