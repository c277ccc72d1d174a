"""Helpers of the original for several processes: values of all ranks, neither padded nor counted, and a barrier."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from trainwright._types import Nested
from trainwright.tensor_tree import map_nested, nested_truncate


def distributed_concat(tensor: Nested, num_total_examples: int | None = None) -> Nested:
    """Joins nested tensors of all processes (of equal shapes) along the first dimension, cut to `num_total_examples`.

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
    """Joins numbers of all processes into one tensor, cut to `num_total_examples`.

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


@contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """Runs the block on local rank 0 first, while the others wait; rank -1 is a single process."""
    if local_rank > 0:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


def find_executable_batch_size(
    function: Callable[..., object] | None = None, starting_batch_size: int = 128, auto_find_batch_size: bool = False
) -> Callable[..., Any]:  # of the function's own type
    """Returns a function with its first argument, the batch size, fixed, or reduced until the call fits into memory.

    Without `function` a decorator. Training itself keeps the effective batch (`loop/micro_batch_retry.py`).
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            auto_find_batch_size=auto_find_batch_size,
        )
    if not auto_find_batch_size:
        return functools.partial(function, batch_size=starting_batch_size)
    from accelerate.utils import find_executable_batch_size as smaller_until_it_fits

    found: Callable[..., Any] = smaller_until_it_fits(function=function, starting_batch_size=starting_batch_size)
    return found
