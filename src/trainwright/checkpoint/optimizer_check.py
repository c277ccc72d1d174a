"""Finds NaN in the saved state of an optimizer, in its files before a checkpoint is committed.

Such a checkpoint has finite weights, but the first step after a resume would break them. It is marked, not refused: a
resume with True or "auto" uses a checkpoint without a mark, and one named by the user is loaded. Infinity is valid,
since some optimizers begin with it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright._types import OPTIMIZER_NAME

Pieces = Callable[[Path], Iterable[tuple[str, str, torch.Tensor]]]  # directory -> file in it, name of tensor, values


def find_nan(folder: Path, *, shards: Pieces) -> tuple[str, str] | None:
    """Returns the first file with NaN in an optimizer's state, and the tensor's name; None if there is none.

    Args:
        folder: a staged checkpoint. None is also returned if its optimizer is missing or cannot be read as plain
            tensors.
        shards: reads the pieces of a sharded optimizer.
    """
    path = folder / OPTIMIZER_NAME
    if path.is_file():
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # no room for a mapping, or the user's own format
        except (MemoryError, OSError, RuntimeError, pickle.UnpicklingError):
            return None
        state = saved.get("state") if isinstance(saved, Mapping) else None
        return next(((path.name, name) for name, one in _tensors(state, "state") if _has_nan(one)), None)
    return next(((at, name) for at, name, one in shards(folder) if _has_nan(one)), None)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in nested dictionaries and lists, with their paths."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(one, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from _tensors(one, f"{name}.{i}")


def _has_nan(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return False
    try:
        return math.isnan(tensor.max().item())  # the maximum is NaN if any value is; makes no copy
    except (NotImplementedError, RuntimeError):  # quantized, or another type without a maximum
        return False
