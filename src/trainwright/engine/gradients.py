"""Clipping and updates where whole and sharded tensors are mixed, which no operation of torch takes together.

And whether a gradient scaler made an update.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from trainwright._types import Optimizer


def with_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the parameters that have a gradient, or may get one."""
    return [p for p in parameters if p.requires_grad or p.grad is not None]


def group_kinds(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors that one operation can take together: whole tensors, and the DTensors of each device mesh."""
    kinds: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(kinds.values())


def clip_each_kind(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their joint 2-norm is at most `max_norm`, as torch does for tensors of one kind.

    Args:
        parameters: their gradients may be whole or sharded, on any device meshes; others are skipped.
        max_norm: limit of the joint norm; infinity measures without clipping.

    Returns:
        The norm before clipping, a scalar on the device; zero if no parameter has a gradient.
    """
    trained = [p for p in parameters if p.grad is not None]
    whole = measure_norm_each_kind(trained)
    for same in group_kinds(trained):
        torch.nn.utils.clip_grads_with_norm_(same, max_norm, whole)
    return whole


def measure_norm_each_kind(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Returns the joint 2-norm of all gradients, as `clip_each_kind` does, and leaves them as they are."""
    kinds = group_kinds(p.grad for p in parameters if p.grad is not None)
    if not kinds:
        return torch.tensor(0.0)
    norms = []
    for grads in kinds:
        norm: Any = torch.nn.utils.get_total_norm(grads)
        # The norm of sharded tensors is sharded itself.
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    whole: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return whole


def has_sparse_gradients(model: nn.Module) -> bool:
    """Returns whether a trained embedding of a model has sparse gradients (`nn.Embedding(sparse=True)`)."""
    return any(
        isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
        for module in model.modules()
    )


def norm_with_sparse(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Returns the joint 2-norm of gradients, some of which are sparse: of these, repeated rows are added up first."""
    parts = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        parts.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
    return torch.nn.utils.get_total_norm(parts)


def clip_with_sparse(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales gradients, some of them sparse, to a joint 2-norm of at most `max_norm`; returns the norm before."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    whole = norm_with_sparse(trained)
    # torch's formula, by which the gradients of other parameters are scaled too
    factor = torch.clamp(max_norm / (whole + 1e-6), max=1.0)
    for gradient in (parameter.grad for parameter in trained):
        if gradient is not None:
            gradient.mul_(factor.to(gradient.device))
    return whole


def step_each_kind(optimizer: Optimizer) -> None:
    """Has an optimizer with groups of whole and sharded tensors update one kind at a time.

    Operations on many tensors at once (`fused`, `foreach`) take one kind only. Its `step` is replaced if groups are
    mixed; the groups themselves stay as they are.
    """
    if all(len(group_kinds(group["params"])) <= 1 for group in optimizer.param_groups):
        return
    step = optimizer.step

    def step_by_kind(self: Any, closure: Any = None) -> Any:
        whole = self.param_groups
        pieces = [[{**g, "params": same} for same in group_kinds(g["params"])] for g in whole]
        self.param_groups = [piece for of_group in pieces for piece in of_group]
        try:
            return step() if closure is None else step(closure)
        finally:
            for group, of_group in zip(whole, pieces, strict=True):
                group.update({key: value for piece in of_group for key, value in piece.items() if key != "params"})
            self.param_groups = whole

    optimizer.step = MethodType(step_by_kind, optimizer)


class StepCall:
    """Whether a gradient scaler called an optimizer's step.

    Attributes:
        is_made: the step was called; the scaler does not call it if it has read that gradients overflowed.
        found_inf: flag with which the scaler lets a fused optimizer skip on the device: a scalar, not 0 where
            gradients overflowed. None for other optimizers.
    """

    __slots__ = ("found_inf", "is_made")

    def __init__(self) -> None:
        self.is_made = False
        self.found_inf: torch.Tensor | None = None


@contextmanager
def noting_step(optimizer: Optimizer) -> Iterator[StepCall]:
    """Notes a call of an optimizer's step within the context, even if the method was replaced."""
    call = StepCall()
    step = optimizer.step
    before = vars(optimizer).get("step")

    @functools.wraps(step)  # a scaler reads the signature
    def noted(*args: Any, **kwargs: Any) -> Any:
        call.is_made = True
        call.found_inf = getattr(optimizer, "found_inf", None)
        return step(*args, **kwargs)

    optimizer.step = noted
    try:
        yield call
    finally:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before
