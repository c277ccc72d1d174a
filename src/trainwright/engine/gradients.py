"""Gradients: clipped, applied and cleared without a walk over the module tree; whole tensors apart from sharded ones.

In main memory a scalar is read and written through its address (`state/meter.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from ctypes import c_float
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from trainwright._types import Optimizer
from trainwright.state.meter import NormReading, float_at

ROUNDING = c_float(1e-6).value  # what clipping adds to a norm, in single precision


class Gradients:
    """The gradients of a fixed list of parameters.

    The list is made once (and again at each epoch), because collecting parameters from the module tree costs more
    than clipping them. `reading` is told of each norm that clipping reads.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], reading: NormReading | None = None) -> None:
        self.parameters = list(parameters)
        self._reading = NormReading() if reading is None else reading
        kinds = {(p.device, p.dtype, type(p.data)) for p in self.parameters}
        self._is_uniform = len(kinds) == 1 and not any(hasattr(kind, "full_tensor") for *_, kind in kinds)
        self._is_read = {(p.device.type, p.dtype) for p in self.parameters} == {("cpu", torch.float32)}
        self._scale = torch.ones(())

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their joint 2-norm is at most `max_norm`; infinity only measures.

        The same operations in the same order as `torch.nn.utils.clip_grad_norm_`, hence the same bits. Returns the norm
        before, a scalar; zero where no parameter has a gradient.
        """
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            grads = [grad for p in self.parameters if (grad := p.grad) is not None]
            if not grads:
                return torch.tensor(0.0)
            if not self._is_uniform:
                return _clip_each_kind(self.parameters, max_norm)
            norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            if max_norm != math.inf:
                is_read = (
                    self._is_read and type(norm) is torch.Tensor
                )  # a stand-in without memory is a class of its own
                scale = self._read_scale(norm, max_norm) if is_read else (max_norm / (norm + 1e-6)).clamp(max=1.0)
                if scale is not None:
                    torch._foreach_mul_(grads, scale)
            return norm
        finally:
            torch._C._set_grad_enabled(before)

    def _read_scale(self, norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
        """Returns `max_norm / (norm + 1e-6)`, each operation rounded as torch rounds it; None where it is 1 or more."""
        scale = float_at(self._scale.data_ptr())
        scale.value = max_norm
        limit = scale.value
        self._reading.norm, self._reading.value = norm, (value := float_at(norm.data_ptr()).value)
        scale.value = value + ROUNDING
        scale.value = 1.0 / scale.value
        scale.value *= limit
        return None if scale.value >= 1.0 else self._scale

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies all gradients by a scalar on their device."""
        with torch.no_grad():
            for grads in of_one_kind(p.grad for p in self.parameters if p.grad is not None):
                torch._foreach_mul_(grads, factor)

    def clear(self) -> None:
        """Sets all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None


class FusedAdam:
    """Updates by torch's fused Adam or AdamW: the operations of its `step`, without what that looks for each time.

    Most of a small model's update is torch's search for hooks, profilers, devices and options.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._groups = optimizer.param_groups
        self._wrapped_step = vars(optimizer).get("step")
        self._in_main_memory = device.type == "cpu"

    @classmethod
    def of(cls, optimizer: Optimizer) -> FusedAdam | None:
        """Returns the updates of an optimizer; None for another class, rare options, or mixed or sharded tensors."""
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return None
        step = vars(optimizer).get("step")
        if step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step:  # a schedule wraps it
            return None
        if any(not group["fused"] or group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
            return None
        kinds = {(p.device, p.dtype, type(p.data)) for group in optimizer.param_groups for p in group["params"]}
        if len(kinds) != 1 or next(iter(kinds))[2] is not torch.Tensor:
            return None
        return cls(optimizer, next(iter(kinds))[0])

    def step(self, optimizer: Optimizer) -> bool:
        """Makes an update; returns False if it is left to `optimizer.step`, which makes states and calls hooks."""
        if (
            optimizer.param_groups is not self._groups
            or vars(optimizer).get("step") is not self._wrapped_step
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or torch._C._autograd._profiler_enabled()
            or getattr(optimizer, "grad_scale", None) is not None
        ):
            return False
        alike: dict[tuple[Any, ...], list[tuple[torch.Tensor, ...]]] = {}  # by settings, which are numbers or tensors
        for group in self._groups:
            others = group["lr"], group["weight_decay"], group["eps"], group["decoupled_weight_decay"]
            rows = alike.setdefault((*group["betas"], *others), [])
            for p in group["params"]:
                if (grad := p.grad) is not None:
                    if not (state := optimizer.state[p]):
                        return False
                    rows.append((p, grad, state["exp_avg"], state["exp_avg_sq"], state["step"]))
        found_inf = getattr(optimizer, "found_inf", None)
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            for (beta1, beta2, lr, weight_decay, eps, is_decoupled), rows in alike.items():
                if not rows:
                    continue
                params, grads, firsts, seconds, steps = map(list, zip(*rows, strict=True))
                if self._in_main_memory:
                    for step in steps:
                        float_at(step.data_ptr()).value += 1
                else:
                    torch._foreach_add_(steps, 1)
                update = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
                update(
                    params, grads, firsts, seconds, [], steps, amsgrad=False, lr=lr, beta1=beta1, beta2=beta2,
                    weight_decay=weight_decay, eps=eps, maximize=False, grad_scale=None, found_inf=found_inf,
                )  # fmt: skip
                if found_inf is not None:
                    torch._foreach_sub_(steps, [found_inf] * len(steps))
        finally:
            torch._C._set_grad_enabled(before)
        optimizer._opt_called = True  # which a schedule looks at in its first step
        return True


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
