"""Two of the original's helpers by name: values of all processes, neither padded nor counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainwright.metrics.nested import map_nested, nested_truncate


def distributed_concat(tensor: Any, num_total_examples: int | None = None) -> Any:
    """A nested value of tensors, equal in shape on all processes, joined along the first dimension and cut there.

    Raises:
        AssertionError: there is no process group.
    """
    joined = map_nested(_gathered, tensor)
    return joined if num_total_examples is None else nested_truncate(joined, num_total_examples)


def distributed_broadcast_scalars(
    scalars: Sequence[int | float],
    num_total_examples: int | None = None,
    device: torch.device | str | None = "cuda",
) -> torch.Tensor:
    """Numbers of all processes in one tensor.

    Raises:
        AssertionError: there is no process group.
    """
    joined = _gathered(torch.tensor(scalars, device=device))
    return joined if num_total_examples is None else joined[:num_total_examples]


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    if not dist.is_available() or not dist.is_initialized():
        raise AssertionError("There is no process group: start the script with torchrun or accelerate launch.")
    mine = (tensor.reshape(1) if tensor.ndim == 0 else tensor).contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)
