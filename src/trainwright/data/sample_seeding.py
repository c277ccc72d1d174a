"""Samples whose random draws are a function of (seed, epoch, sample): the same for any number of workers.

All generators are seeded before each sample is read, and once more before the batch is collated, from its first sample.
Where the main process reads, its own random states are put back after each batch; the `Loader` does that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from trainwright.data.worker_seeding import seed_from


class EpochIndices(list[Any]):
    """Indices of a batch that say of which epoch they are."""

    epoch: int = 0


class SeededRows(list[Any]):
    """Samples of a batch on their way to the collator, and what it is seeded with."""

    origin: tuple[int, ...]


class SeededItems(Dataset[Any]):
    """A dataset that seeds all generators before it reads a sample."""

    def __init__(self, source: Any, seed: int) -> None:
        self.source = source
        self.seed = seed

    def __getattr__(self, name: str) -> Any:
        """What is asked of a dataset is answered by the user's."""
        if name in ("source", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        return self.source[index]

    def __getitems__(self, indices: Sequence[Any]) -> SeededRows:
        epoch = indices.epoch if isinstance(indices, EpochIndices) else 0
        rows = SeededRows()
        rows.origin = (self.seed, epoch, _number(indices[0]), 1)
        for index in indices:
            seed_from((self.seed, epoch, _number(index), 0))
            rows.append(self.source[index])
        return rows


class SeededCollator:
    """Seeds all generators, then calls the collator."""

    def __init__(self, data_collator: Callable[[list[Any]], Any]) -> None:
        self.data_collator = data_collator

    def __call__(self, rows: list[Any]) -> Any:
        if isinstance(rows, SeededRows):
            seed_from(rows.origin)
        return self.data_collator(list(rows))


def _number(index: Any) -> int:
    """A number that stands for an index, which may also be a group of samples."""
    return index if isinstance(index, int) else zlib.crc32(repr(index).encode())
