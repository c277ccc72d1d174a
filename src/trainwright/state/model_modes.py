"""A model put back as it was: training modes of its modules, gradients and buffers. Weights are not its business."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainwright._types import Model


class ModuleModes:
    """Training or evaluation mode of every module of a model, as they are when this object is made."""

    def __init__(self, model: Model) -> None:
        self._modes = [(module, module.training) for module in model.modules()]

    def restore(self) -> None:
        """Puts every module back into its mode."""
        for module, was_training in self._modes:
            if module.training != was_training:
                module.training = was_training


@contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """The model in evaluation mode and without gradients; afterwards each module is in the mode it was in."""
    modes = ModuleModes(model)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        modes.restore()


@contextmanager
def unchanged_model(model: Model) -> Iterator[None]:
    """Whatever a step inside does to a model besides its weights is undone: gradients, buffers, modes."""
    modes = ModuleModes(model)
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        modes.restore()
