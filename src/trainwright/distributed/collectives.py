"""Collective operations: values gathered, summed, or decided by one rank, over all processes or a group of them.

All processes of a group call each function in the same order. Tensors are sent from the device that the backend of the
group works with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainwright._types import IGNORE_INDEX
from trainwright.errors import DataError
from trainwright.support.tensor_tree import iterate_tensors, map_nested

T = TypeVar("T")
Shape = tuple[int, ...]
Group = dist.ProcessGroup | None  # None: all processes
_groups: dict[str, tuple[Group, Group]] = {}  # purpose -> (default group, its own group)


def data_parallel_group(num_together: int) -> Group:
    """Process group of ranks with one place in their replicas of `num_together` ranks; None: all processes."""
    if num_together == 1:
        return None
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(place, world, num_together))) for place in range(num_together)]
    return groups[dist.get_rank() % num_together]  # type: ignore[no-any-return]


def gather(value: Any, device: torch.device, group: Group = None) -> Any:
    """Gathers a nested value of tensors, concatenated along the first dimension in the order of ranks.

    First dimensions may differ between ranks, and a scalar counts as one row; where another dimension differs, the
    shorter ones are padded with -100. They are sent from `device` and returned on the device where each was. Different
    structures are a DataError.
    """
    mine = list(iterate_tensors(value))
    if not mine:
        return value
    layouts = gather_objects([(tuple(tensor.shape), tensor.dtype) for tensor in mine], group)
    _check_alike(layouts)
    joined = iter([_gather_one(mine[i], [one[i][0] for one in layouts], device, group) for i in range(len(mine))])
    return map_nested(lambda leaf: next(joined) if isinstance(leaf, torch.Tensor) else leaf, value)


def total(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Sums a tensor, of the same shape in all processes, over them; a new tensor."""
    result = tensor.clone()
    dist.all_reduce(result, group=group)
    return result


def start_total(tensor: torch.Tensor, group: Group = None) -> Callable[[], torch.Tensor]:
    """Starts `total`, and returns a function that waits for the sum and returns it."""
    result = tensor.clone()
    work = dist.all_reduce(result, group=group, async_op=True)

    def receive() -> torch.Tensor:
        work.wait()
        return result

    return receive


def stacked(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Stacks a tensor of each process, of the same shape in all, along a new first dimension, in the order of ranks."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, tensor.contiguous(), group=group)
    return torch.stack(rows)


def gather_objects(value: T, group: Group = None) -> list[T]:
    """Gathers one object of each process, in the order of ranks, by pickling; for small values that are no tensors."""
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def gather_counts(count: int) -> list[int]:
    """Gathers a number of each process, in the order of ranks, by main memory, so that no device is synchronized."""
    has_cpu = "cpu:" in str(dist.get_backend_config())
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(counts, torch.tensor([count]), group=None if has_cpu else cpu_group("counts"))
    return [int(one) for one in counts]


def cpu_group(purpose: str) -> Group:
    """Group of all processes that works on the CPU, made at the first call for a purpose, with messages of its own."""
    everybody = dist.group.WORLD
    if purpose not in _groups or _groups[purpose][0] is not everybody:
        _groups[purpose] = everybody, dist.new_group(backend="gloo")
    return _groups[purpose][1]


def broadcast_from_main(decide: Callable[[], T]) -> T:
    """Calls a function in the main process alone, and returns its result, or raises its error, in all of them."""
    box: list[Any] = [None, None]  # the result, of any type, and the error
    if dist.get_rank() == 0:
        try:
            box[0] = decide()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        box[1].is_everybodys = True  # no process failed before the others
        raise box[1]
    return box[0]  # type: ignore[no-any-return]


def _gather_one(tensor: torch.Tensor, shapes: list[Shape], device: torch.device, group: Group) -> torch.Tensor:
    shapes = [shape or (1,) for shape in shapes]
    largest = tuple(map(max, zip(*shapes, strict=True)))
    is_ragged = any(shape[1:] != largest[1:] for shape in shapes)
    sent = tensor.detach().to(device)
    sent = sent.reshape(1) if sent.ndim == 0 else sent
    if is_ragged and sent.dtype in (torch.bool, torch.uint8):  # these have no -100
        sent = sent.to(torch.int16)
    if tuple(sent.shape) != largest:
        padded = sent.new_full(largest, IGNORE_INDEX if is_ragged else 0)
        padded[tuple(map(slice, sent.shape))] = sent
        sent = padded
    # A single row of a column counts as contiguous with any stride, and cannot be read as bytes then.
    sent = sent.contiguous() if sent.stride(-1) == 1 else sent.clone(memory_format=torch.contiguous_format)
    as_bytes = sent.view(torch.uint8)  # backends support few types, and all of them this one
    rows = [torch.empty_like(as_bytes) for _ in shapes]
    dist.all_gather(rows, as_bytes, group=group)
    parts = [row.view(sent.dtype)[: shape[0]] for row, shape in zip(rows, shapes, strict=True)]
    return torch.cat(parts).to(tensor.device)


def _check_alike(layouts: list[list[tuple[Shape, torch.dtype]]]) -> None:
    kinds = [[(len(shape) or 1, dtype) for shape, dtype in one] for one in layouts]  # a scalar is one row
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise DataError(
                f"Processes bring different results to one collection: process 0 has (dimensions, type) {kinds[0]}, "
                f"process {rank} has {kind}. Every process must give tensors of the same kinds in the same order."
            )
