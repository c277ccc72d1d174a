"""Check of the disk space before a checkpoint is written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.weights import is_adapter
from trainwright.errors import CheckpointWriteError
from trainwright.tensor_tree import tensors_of

STATES_PER_WEIGHT = 2  # of Adam and its kin; only an estimate, and only before the first step


def weights_bytes(model: nn.Module) -> int:
    """Returns the least bytes of the weights; of an adapter those of its trained ones."""
    parameters = [p for p in model.parameters() if p.requires_grad or not is_adapter(model)]
    return _distinct_bytes([*parameters, *(() if is_adapter(model) else model.buffers())])


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Returns the bytes of an optimizer's states now; few before its first step."""
    return _distinct_bytes(list(tensors_of(list(getattr(optimizer, "state", {}).values()))))


def estimated_optimizer_bytes(model: nn.Module) -> int:
    """Estimates the bytes of an optimizer's states after its first step."""
    return STATES_PER_WEIGHT * _distinct_bytes([p for p in model.parameters() if p.requires_grad])


def _distinct_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum({(t.device, t.data_ptr()): t.numel() * t.element_size() for t in tensors}.values())


def check_free_space(root: Path, needed: int, *, what: str) -> None:
    """Raises CheckpointWriteError where the disk of `root`, which need not exist, has fewer bytes free than needed."""
    free = free_bytes(root)
    if free is not None and free < needed:
        raise CheckpointWriteError(shortage_message(root, needed, free, what=what))


def shortage_message(root: Path, needed: int, free: int, *, what: str) -> str:
    """Returns the message of a full disk, with its cures."""
    return (
        f"{what} needs at least {size_text(needed)}, and {size_text(free)} are free at {root}. Make room, choose "
        "another output_dir, save less (save_only_model=True), or keep fewer checkpoints (save_total_limit)."
    )


def free_bytes(root: Path) -> int | None:
    """Returns the free bytes on the disk of a directory, which need not exist; None where unknown."""
    there = next((path for path in (root, *root.absolute().parents) if path.is_dir()), None)
    try:
        return None if there is None else shutil.disk_usage(there).free
    except OSError:
        return None


def size_text(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
