"""Mixed precision on one device: autocast around the forward pass, loss scaling for fp16."""

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
    """The model's `forward` under autocast, as accelerate does it: the loss outside of the model sees fp32.

    Outputs come back in fp32, for metrics and for losses of one's own. Where the model computes its loss itself and
    nobody looks at the other outputs (`keeps_outputs=False`), copying them in training would only cost memory.
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
    halves = (torch.float16, torch.bfloat16)
    return map_nested(lambda t: t.float() if isinstance(t, torch.Tensor) and t.dtype in halves else t, outputs)


def apply_tf32(plan: PrecisionPlan) -> None:
    if plan.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = plan.tf32
        torch.backends.cudnn.allow_tf32 = plan.tf32


@contextmanager
def eval_precision(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """The model in another type for an evaluation; afterwards it has the very weights that it had before."""
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
