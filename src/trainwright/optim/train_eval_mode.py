"""Training and evaluation mode of a model and of optimizers that have such modes (schedule-free ones).

An evaluation in the middle of training must leave no trace: the mode of each module is remembered, as the user may want
a part in evaluation mode, and so are the weights, which a schedule-free optimizer moves to the average and back, and
rounds.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.state.model_modes import ModuleModes


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
    """Puts a model and its optimizer, if there is one yet, into evaluation mode, until `end`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._modes = ModuleModes(model)
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        if optimizer is not None and callable(getattr(optimizer, "eval", None)):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._weights = [(parameter, parameter.detach().clone()) for parameter in parameters]
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
