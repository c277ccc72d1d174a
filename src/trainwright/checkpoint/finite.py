"""Whether the weights of a staged checkpoint are finite, read from their files right after the digests.

The files were just written, so their pages are in memory. Buffers are not looked at: masks and ranges that are observed
begin with infinities.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

PIECE = 1 << 18  # elements that are compared at once, so that they stay in the cache
NOT_WEIGHTS = ("optimizer", "rng_state")  # beginnings of names


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """What is asked of the weights of a checkpoint.

    Attributes:
        is_strict: weights that are not finite are refused where a good checkpoint exists; else they are only marked.
        buffers: names of tensors that are no weights.
    """

    is_strict: bool = False
    buffers: frozenset[str] = frozenset()

    def find(self, folder: Path) -> tuple[str, str] | None:
        """Returns the first file below a directory, and its tensor, that is not finite; None where all are.

        Args:
            folder: with weights as safetensors; other files are not read.
        """
        for path in sorted(folder.rglob("*.safetensors")):
            name = None if path.name.startswith(NOT_WEIGHTS) else self._first_in(path)
            if name is not None:
                return path.relative_to(folder).as_posix(), name
        return None

    def _first_in(self, path: Path) -> str | None:
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name not in self.buffers]  # noqa: SIM118 -- no mapping
                return next((name for name in names if not _is_finite(file.get_tensor(name))), None)
        except SafetensorError:  # a file of the user's own, with this ending
            return None


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return True
    flat = tensor.reshape(-1)
    pieces = (flat[start : start + PIECE] for start in range(0, len(flat), PIECE))
    return all(bool(torch.isfinite(torch.stack(torch.aminmax(piece))).all()) for piece in pieces)
