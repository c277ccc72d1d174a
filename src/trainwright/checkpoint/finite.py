"""Check that the weights of a staged checkpoint are finite, read from their files right after the digests.

The files were just written, so their pages are in memory. Buffers are not looked at: masks and ranges that are observed
begin with infinities. The process that commits reads the shards of all, so there is one verdict.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

PIECE = 1 << 18  # elements that are compared at once, so that they stay in the cache
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
NOT_WEIGHTS = ("optimizer", "rng_state")  # beginnings of names


Pieces = Callable[[Path], Iterable[tuple[str, str, torch.Tensor]]]  # directory -> file in it, name of tensor, values


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """Rule for the weights of a checkpoint.

    Attributes:
        is_strict: weights that are not finite are refused where a good checkpoint exists; else they are only marked.
        buffers: names of tensors that are no weights.
        shards: reads the weights of a sharded checkpoint, piece by piece.
    """

    is_strict: bool = False
    buffers: frozenset[str] = frozenset()
    shards: Pieces = lambda folder: ()

    def find(self, folder: Path) -> tuple[str, str] | None:
        """Returns the first file below a directory, and its tensor, that is not finite; None where all are.

        Args:
            folder: with weights as safetensors, in torch's files, or sharded; other files are not read.
        """
        for path in sorted(path for pattern in WEIGHTS for path in folder.rglob(pattern)):
            name = None if path.name.startswith(NOT_WEIGHTS) else self._first_in(path)
            if name is not None:
                return path.relative_to(folder).as_posix(), name
        shards = self.shards(folder)
        return next(((at, name) for at, name, one in shards if name not in self.buffers and not _is_finite(one)), None)

    def _first_in(self, path: Path) -> str | None:
        try:
            named = _tensors_of(path)
            return next((name for name, one in named if name not in self.buffers and not _is_finite(one)), None)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, AttributeError):  # the user's own, so named
            return None


def _tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- no mapping
                yield name, file.get_tensor(name)
    else:
        yield from torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()


def _is_finite(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return True
    flat = tensor.reshape(-1)
    pieces = (flat[start : start + PIECE] for start in range(0, len(flat), PIECE))
    return all(bool(torch.isfinite(torch.stack(torch.aminmax(piece))).all()) for piece in pieces)
