"""Mixed precision on one device: autocast around the forward pass, loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from trainwright.config.plans import PrecisionPlan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(plan: PrecisionPlan, device: torch.device) -> AbstractContextManager[Any] | None:
    dtype = DTYPES.get(plan.mixed)
    return None if dtype is None else torch.autocast(device_type=device.type, dtype=dtype)


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
