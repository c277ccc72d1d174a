"""Values sent between processes: gathered, summed, decided by one. What they mean is not its business.

Every process must call these in the same order. They run over all processes or over a group of them (`peers`), on the
device that the backend works with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainwright._types import IGNORE_INDEX
from trainwright.errors import DataError
from trainwright.tensor_tree import map_nested

T = TypeVar("T")
Group = dist.ProcessGroup | None  # None: all processes
_groups: dict[str, tuple[Group, Group]] = {}  # for each purpose the default group, and the one beside it


def data_parallel_group(num_together: int) -> Group:
    """The processes that are to their replica what this one is to its own, where `num_together` in a row form one.

    All processes call it.
    """
    if num_together == 1:
        return None
    world, groups = dist.get_world_size(), []
    for place in range(num_together):
        groups.append(dist.new_group(list(range(place, world, num_together))))
    return groups[dist.get_rank() % num_together]  # type: ignore[no-any-return]


def gather(value: Any, device: torch.device, group: Group = None) -> Any:
    """A nested value of tensors from all processes, concatenated along the first dimension in order of rank.

    Tensors may have different first dimensions (also none at all: a scalar counts as one row); where another dimension
    differs, the shorter ones are filled up with -100.

    Raises:
        DataError: the processes brought different structures.
    """
    mine = _tensors(value)
    if not mine:
        return value
    layouts = gather_objects([(tuple(tensor.shape), tensor.dtype) for tensor in mine], group)
    _check_alike(layouts)
    shapes = [[one[i][0] for one in layouts] for i in range(len(mine))]
    joined = iter([_gather_one(tensor, its, device, group) for tensor, its in zip(mine, shapes, strict=True)])
    return map_nested(lambda leaf: next(joined) if isinstance(leaf, torch.Tensor) else leaf, value)


def total(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The sum over all processes; the tensor that came stays as it was."""
    result = tensor.clone()
    dist.all_reduce(result, group=group)
    return result


def stacked(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The tensors of all processes, which have one shape, along a new first dimension."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, tensor.contiguous(), group=group)
    return torch.stack(rows)


def gather_objects(value: T, group: Group = None) -> list[T]:
    """One object of each process, by rank; for small things that tensors cannot hold."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_counts(count: int) -> list[int]:
    """A number of each process, by rank; it goes from main memory to main memory, so no device is waited for."""
    works_here = "gloo" in str(dist.get_backend_config())
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(counts, torch.tensor([count]), group=None if works_here else _beside("counts"))
    return [int(one) for one in counts]


def background_group() -> Group:
    """A group of all processes for threads behind training's back, whose messages must not mix with training's."""
    return _beside("behind")


def _beside(purpose: str) -> Group:
    """A group of all processes that works on the CPU, whatever the device; made at the first call, which all make at
    the same place of their work.
    """
    everybody = dist.group.WORLD
    if purpose not in _groups or _groups[purpose][0] is not everybody:
        _groups[purpose] = everybody, dist.new_group(backend="gloo")
    return _groups[purpose][1]


def broadcast_from_main(decide: Callable[[], T]) -> T:
    """What the main process decides, in all. An error of its decision is raised in all of them."""
    box: list[Any] = [None, None]
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


def _gather_one(
    tensor: torch.Tensor, shapes: list[tuple[int, ...]], device: torch.device, group: Group
) -> torch.Tensor:
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
    as_bytes = sent.contiguous().view(torch.uint8)  # backends know few types, and all of them know this one
    rows = [torch.empty_like(as_bytes) for _ in shapes]
    dist.all_gather(rows, as_bytes, group=group)
    parts = [row.view(sent.dtype)[: shape[0]] for row, shape in zip(rows, shapes, strict=True)]
    return torch.cat(parts).to(tensor.device)


def _check_alike(layouts: list[list[tuple[tuple[int, ...], torch.dtype]]]) -> None:
    kinds = [[(len(shape), dtype) for shape, dtype in one] for one in layouts]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise DataError(
                f"Processes bring different results to one collection: process 0 has (dimensions, type) {kinds[0]}, "
                f"process {rank} has {kind}. Every process must give tensors of the same kinds in the same order."
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_nested(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, value)
    return found
