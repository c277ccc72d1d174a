"""A model put back as it was: training modes of its modules, gradients, buffers, and an evaluation's traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

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


def train_mode(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Puts a model, and an optimizer that has modes, into training mode."""
    model.train()
    if callable(switch := getattr(optimizer, "train", None)):
        switch()


def eval_mode(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Puts a model, and an optimizer that has modes, into evaluation mode."""
    if callable(getattr(model, "eval", None)):
        model.eval()
    if callable(switch := getattr(optimizer, "eval", None)):
        switch()


class EvalModeGuard:
    """Puts a model and its optimizer, if there is one yet, into evaluation mode, until `end`.

    An evaluation in the middle of training must leave no trace: the mode of each module is remembered, as the user may
    want a part in evaluation mode, and the weights, which a schedule-free optimizer moves to the average and rounds.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._modes = ModuleModes(model)
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        if optimizer is not None and callable(getattr(optimizer, "eval", None)):
            self._weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        eval_mode(model, optimizer)

    def discard_saved_weights(self) -> None:
        """Drops the weights to restore: a checkpoint has the present ones, and a resume starts from these."""
        self._weights = []

    def end(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Restores the modes and the weights from before."""
        train_mode(model, optimizer)
        self._modes.restore()
        with torch.no_grad():
            for parameter, before in self._weights:
                parameter.copy_(before)
