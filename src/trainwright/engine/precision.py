"""Precision: autocast around the forward pass, evaluation in another type, formats and peak speed of a device."""

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
    since outputs that nobody uses would only cost memory.
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


# Part of the device's name -> operations per second. The first that matches counts, so the longer name comes first.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}


def supports_bf16(device: torch.device) -> bool | None:
    """Returns True if a device computes in bf16; None where it cannot be asked."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else None


def supports_tf32(device: torch.device) -> bool | None:
    """Returns True if a device has TF32, NVIDIA's since Ampere (compute capability 8.0)."""
    return torch.cuda.get_device_capability(device) >= (8, 0) if device.type == "cuda" else False


def peak_flops(device: torch.device) -> float | None:
    """Peak operations per second of a device; None where it is not known."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(device_name: str) -> float | None:
    """Returns the peak of a device in bf16 operations per second, by its name; None: not in the table."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
