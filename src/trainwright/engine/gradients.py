"""Clipping and updates where whole and sharded tensors are mixed, which no operation of torch takes together."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from trainwright._types import Optimizer


def of_one_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors that one operation can take together: the whole ones, and those (DTensors) of each device mesh."""
    kinds: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(kinds.values())


def clip_each_kind(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their joint 2-norm is at most `max_norm`, as torch does for tensors of one kind.

    Args:
        parameters: their gradients may be whole or sharded, on any device meshes; parameters without one are skipped.
        max_norm: limit of the joint norm; infinity measures without clipping.

    Returns:
        The norm before clipping, a scalar on the device; zero if no parameter has a gradient.
    """
    trained = [p for p in parameters if p.grad is not None]
    kinds = of_one_kind(p.grad for p in trained if p.grad is not None)
    if not kinds:
        return torch.tensor(0.0)
    norms = []
    for grads in kinds:
        norm: Any = torch.nn.utils.get_total_norm(grads)
        # The norm of sharded tensors is sharded itself.
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    whole: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for same in of_one_kind(trained):
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
