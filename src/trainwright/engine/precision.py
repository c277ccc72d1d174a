"""Precision: autocast around the forward pass, and evaluation in another type."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainwright.config.plans import PrecisionPlan
from trainwright.support.tensor_tree import map_nested

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def autocast_forward(
    model: nn.Module, plan: PrecisionPlan, device: torch.device, *, keeps_outputs: bool = True
) -> Iterator[None]:
    """Runs the model's `forward` under autocast within the context, as accelerate does it.

    Outputs are converted to fp32, for metrics and for losses outside of the model; in training only if `keeps_outputs`,
    since unused outputs would only cost memory.
    """
    dtype = DTYPES.get(plan.mixed)
    if dtype is None:
        yield
        return
    original = model.forward
    before = vars(model).get("forward")

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type=device.type, dtype=dtype):
            outputs = original(*args, **kwargs)
        return as_fp32(outputs) if keeps_outputs or not model.training else outputs

    model.forward = forward
    try:
        yield
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before


def as_fp32(outputs: Any) -> Any:
    """Converts tensors in half precision of a nested value to fp32; the others are the same."""
    halves = (torch.float16, torch.bfloat16)
    return map_nested(lambda t: t.float() if isinstance(t, torch.Tensor) and t.dtype in halves else t, outputs)


@contextmanager
def eval_precision(model: nn.Module, dtype: torch.dtype | None, *, restores: bool = True) -> Iterator[None]:
    """Converts a model to another type, unless that is None; at the end it has its own weights again, unrounded.

    Without `restores` it keeps the other type.
    """
    if dtype is None or not restores:
        if dtype is not None:
            model.to(dtype)
        yield
        return
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    originals = [t.data for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original
