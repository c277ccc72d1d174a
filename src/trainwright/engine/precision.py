"""Mixed precision: autocast around the forward pass of a model, and evaluation in another type."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainwright.config.plans import PrecisionPlan
from trainwright.tensor_tree import map_nested

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def autocast_forward(
    model: nn.Module, plan: PrecisionPlan, device: torch.device, *, keeps_outputs: bool = True
) -> Iterator[None]:
    """Runs the model's `forward` under autocast within the context, as accelerate does it.

    Outputs are converted to fp32, for metrics and for losses outside of the model.

    Args:
        model: the model as the loop uses it.
        plan: with the type of autocast.
        device: where the model computes.
        keeps_outputs: whether outputs besides the loss are used in training; otherwise they are not converted then,
            which would only cost memory.
    """
    dtype = DTYPES.get(plan.mixed)
    if dtype is None:
        yield
        return
    original, before = model.forward, vars(model).get("forward")

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
    """Converts tensors in half precision to fp32.

    Args:
        outputs: a nested value, as a model returns it.

    Returns:
        The value with converted tensors; the others are the same.
    """
    halves = (torch.float16, torch.bfloat16)
    return map_nested(lambda t: t.float() if isinstance(t, torch.Tensor) and t.dtype in halves else t, outputs)


@contextmanager
def eval_precision(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Converts a model to another type within the context; at the end it has its own weights again, unrounded.

    Args:
        model: the model that is evaluated.
        dtype: the type; None: the model stays as it is.
    """
    if dtype is None:
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
