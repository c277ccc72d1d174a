"""Autocast of the stand-in: which operations compute in half precision and which in fp32, as on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from .device import NAME, is_here

LOWER = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "addmv",
    "mv",
    "matmul",
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "_convolution",
    "prelu",
    "scaled_dot_product_attention",
    "einsum",
)
FP32 = (
    "softmax.int",
    "log_softmax.int",
    "layer_norm",
    "group_norm",
    "nll_loss",
    "nll_loss2d",
    "cross_entropy_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "kl_div",
    "exp",
    "log",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "rsqrt",
    "sum",
    "sum.dim_IntList",
    "prod",
    "cumsum",
    "norm.Scalar",
    "softplus",
    "erfinv",
    "binary_cross_entropy_with_logits",
)
PROMOTE = ("cat", "stack", "addcmul", "addcdiv", "index_put", "scatter_add")
HALVES = (torch.float16, torch.bfloat16)


def register(library: torch.library.Library) -> None:
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _kept.append(everything)
    for name in LOWER:
        library.impl(name, _cast(name, lambda values: torch.get_autocast_dtype(NAME)), "AutocastPrivateUse1")
    for name in FP32:
        library.impl(name, _cast(name, lambda values: torch.float32), "AutocastPrivateUse1")
    for name in PROMOTE:
        library.impl(name, _cast(name, _widest), "AutocastPrivateUse1")


_kept: list[torch.library.Library] = []


def _widest(values: list[torch.Tensor]) -> torch.dtype:
    is_wide = any(value.dtype == torch.float32 for value in values)
    return torch.float32 if is_wide else torch.get_autocast_dtype(NAME)


def _cast(name: str, choose: Any) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        values: list[torch.Tensor] = []
        tree_map(lambda one: values.append(one) if _is_float(one) else None, (args, kwargs))
        dtype = choose(values)

        def cast(one: Any) -> Any:
            return one.to(dtype) if _is_float(one) and one.dtype != dtype else one

        excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            args, kwargs = tree_map(cast, (args, kwargs))
            return op(*args, **kwargs)

    return run


def _is_float(value: object) -> bool:
    return is_here(value) and value.dtype in (torch.float32, *HALVES)  # type: ignore[attr-defined]
