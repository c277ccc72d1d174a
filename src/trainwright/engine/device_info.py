"""What a device can do: its formats, and its peak of dense matrix products in 16-bit floats by the data sheets."""

from __future__ import annotations

import torch

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
    """Whether a device computes in bf16; None where it cannot be asked."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else None


def supports_tf32(device: torch.device) -> bool | None:
    """Whether a device has TF32, NVIDIA's since Ampere (compute capability 8.0)."""
    return torch.cuda.get_device_capability(device) >= (8, 0) if device.type == "cuda" else False


def peak_flops(device: torch.device) -> float | None:
    """Peak operations per second of a device; None where it is not known."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> float | None:
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
