"""Gradients of one device: clipped and cleared without walking over the module tree."""

from __future__ import annotations

import math
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
        kinds = {(p.device, p.dtype, type(p.data)) for p in self.parameters}
        self._is_uniform = len(kinds) == 1 and not any(hasattr(kind, "full_tensor") for *_, kind in kinds)

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their joint 2-norm is at most `max_norm`; returns the norm before.

        The same operations in the same order as `torch.nn.utils.clip_grad_norm_`, hence the same bits.
        """
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            return torch.tensor(0.0)
        if not self._is_uniform:
            mixed = torch.nn.utils.get_total_norm(grads)
            # Of tensors whose parts are in several processes it has parts itself.
            whole: torch.Tensor = mixed.full_tensor() if hasattr(mixed, "full_tensor") else mixed
            if max_norm != math.inf:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, whole)
            return whole
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if max_norm != math.inf:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
