"""Gradients: clipped and cleared without a walk over the module tree, whole tensors apart from sharded ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from trainwright._types import Optimizer


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
        """Scales all gradients so that their joint 2-norm is at most `max_norm`; infinity only measures.

        The same operations in the same order as `torch.nn.utils.clip_grad_norm_`, hence the same bits. Returns the norm
        before, a scalar; zero where no parameter has a gradient.
        """
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            return torch.tensor(0.0)
        if not self._is_uniform:
            return _clip_each_kind(self.parameters, max_norm)
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if max_norm != math.inf:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def clear(self) -> None:
        """Sets all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None


def of_one_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors that one operation can take together: the whole ones, and those (DTensors) of each device mesh."""
    kinds: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(kinds.values())


def _clip_each_kind(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    norms = []
    for grads in of_one_kind(p.grad for p in parameters if p.grad is not None):
        norm: Any = torch.nn.utils.get_total_norm(grads)
        # The norm of sharded tensors is sharded itself.
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    whole: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm != math.inf:
        for same in of_one_kind(p for p in parameters if p.grad is not None):
            torch.nn.utils.clip_grads_with_norm_(same, max_norm, whole)
    return whole


def step_each_kind(optimizer: Optimizer) -> None:
    """Has an optimizer whose groups mix whole and sharded tensors update one kind at a time.

    Operations on many tensors at once (`fused`, `foreach`) take one kind only. Its `step` is replaced if groups are
    mixed; the groups themselves stay as they are.
    """
    if all(len(of_one_kind(group["params"])) <= 1 for group in optimizer.param_groups):
        return
    step = optimizer.step

    def step_by_kind(self: Any, closure: Any = None) -> Any:
        whole = self.param_groups
        pieces = [[{**g, "params": same} for same in of_one_kind(g["params"])] for g in whole]
        self.param_groups = [piece for of_group in pieces for piece in of_group]
        try:
            return step() if closure is None else step(closure)
        finally:
            for group, of_group in zip(whole, pieces, strict=True):
                group.update({key: value for piece in of_group for key, value in piece.items() if key != "params"})
            self.param_groups = whole

    optimizer.step = MethodType(step_by_kind, optimizer)
