"""NaN in the saved state of an optimizer, found in its files before a checkpoint is committed.

Such a checkpoint has finite weights, but the first step after a resume would break them. It is marked, not refused: a
resume by True or "auto" takes one without a mark, and one that the user names is loaded. Infinity is no fault, since
some optimizers begin with it.
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
    """Returns the first file with NaN in an optimizer's state, and the name of the tensor; None where there is none.

    Args:
        folder: a staged checkpoint; one without an optimizer, or with one that cannot be read as plain tensors, has
            none.
        shards: reads the pieces of a sharded optimizer.
    """
    path = folder / OPTIMIZER_NAME
    if path.is_file():
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (MemoryError, OSError, RuntimeError, pickle.UnpicklingError):  # no room for a mapping, or the user's own
            return None
        state = saved.get("state") if isinstance(saved, Mapping) else None
        return next(((path.name, name) for name, one in _tensors(state, "state") if _has_nan(one)), None)
    return next(((at, name) for at, name, one in shards(folder) if _has_nan(one)), None)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of nested dictionaries and lists, with their path."""
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
        return math.isnan(tensor.max().item())  # the largest is NaN if one value is, and no copy is made
    except (NotImplementedError, RuntimeError):  # quantized, or of another kind that has no largest value
        return False
