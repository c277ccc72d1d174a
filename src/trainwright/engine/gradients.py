"""Gradients of one device: clipped and cleared without walking over the module tree."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Gradients:
    """The gradients of a fixed list of parameters.

    The list is made once (and again at each epoch), because collecting parameters from the module tree costs more
    than clipping them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their joint 2-norm is at most `max_norm`; returns the norm before.

        The same operations in the same order as `torch.nn.utils.clip_grad_norm_`, hence the same bits.
        """
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            return torch.tensor(0.0)
        if max_norm == float("inf"):
            return torch.nn.utils.get_total_norm(grads)
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
