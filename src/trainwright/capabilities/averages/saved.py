"""The averaged weights in a checkpoint, read and reduced to one set; `extension.py` makes and writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainwright._types import JSONObject, is_count
from trainwright.capability_table import FILES
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.errors import CheckpointError

ENTRY = "averages"
AVERAGES_NAME = FILES[ENTRY]
# (averages, new values, number of entries so far)
Add: TypeAlias = Callable[[list[torch.Tensor], list[torch.Tensor], int], None]


def widened(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """Returns a tensor in fp32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=copy)


def compute_mean(entries: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the mean of lists of tensors with the same shapes, in fp32 or wider, as new tensors."""
    first, *others = entries
    means = [widened(one, copy=True) for one in first]
    add: Add = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
    for number, entry in enumerate(others, start=1):
        add(means, [widened(one) for one in entry], number)
    return means


def is_average(state: JSONObject) -> bool:
    """Returns whether this may be a saved average; raises KeyError, TypeError or AttributeError otherwise."""
    copies: list[Any] = state["copies"]
    tensors = [value for copy in copies for value in copy.values()]
    shapes = {tuple((name, value.shape) for name, value in copy.items()) for copy in copies}
    return (
        isinstance(state["kind"], str)
        and is_count(state["num"])
        and len(shapes) <= 1
        and all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in tensors)
    )


def read_average(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the averaged weights of a checkpoint by parameter name, on the CPU.

    Raises:
        CheckpointError: it has none, or they cannot be read.
    """
    state = Checkpoint(checkpoint).entry(ENTRY).state(is_average)
    if not state or not state["copies"]:
        raise CheckpointError(
            f"{checkpoint} has no averaged weights. Train with average='ema', 'swa' or 'lawa', and export a checkpoint "
            "that was saved after the average began."
        )
    copies: list[dict[str, torch.Tensor]] = state["copies"]
    return dict(zip(copies[0], compute_mean([list(copy.values()) for copy in copies]), strict=True))
