"""Chunks of an order, each one batch of all processes together, and the part of a chunk for one process.

An order is cut into chunks of `num_processes * batch_size` samples, and process r takes part r of each chunk. Example:
two processes with batches of 3 over the order 0..13. Chunks 0-5 and 6-11 are full, so process 0 trains on 012, 678 and
process 1 on 345, 9ab; the tail cd (two samples) is divided evenly: c to process 0, d to process 1. If the tail had only
one sample, process 1 would get it again as a filler batch of weight zero, which keeps the processes in step. So every
process has the same number of batches, and every sample of the epoch counts once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Positions of a chunk, from `start` up to `stop`, assigned to one process."""

    start: int
    stop: int
    num_samples: int  # number that count; 0 for a filler batch
    # factor for a mean over the part, so that the mean over all processes is the mean over the chunk
    weight: float


def in_chunks(indices: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Cuts an iterator's items into lists of `size`; the last may be shorter. Built without Python calls per item."""
    chunks = map(list, map(itertools.islice, itertools.repeat(indices), itertools.repeat(size)))
    return itertools.takewhile(bool, chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One of the processes that share an order."""

    batch_size: int  # samples of a full batch on each process
    rank: int = 0
    num_processes: int = 1
    # A tail is split into parts that differ by at most one sample; otherwise the first processes get full batches, the
    # next one gets the rest, and the others get filler batches.
    even: bool = True

    @property
    def chunk_size(self) -> int:
        """Number of samples in a batch of all processes."""
        return self.batch_size * self.num_processes

    def num_batches(self, num_samples: int, *, drop_last: bool) -> int:
        """Returns the number of batches that each process makes from `num_samples` samples."""
        full, rest = divmod(num_samples, self.chunk_size)
        return full + int(rest > 0 and not drop_last)

    def part(self, size: int) -> ChunkPart:
        """Returns this process's part of a chunk of `size` samples (at least one)."""
        start, stop = self._bounds(size)
        num_samples = stop - start
        weight = num_samples * self.num_processes / size
        return ChunkPart(start, stop, num_samples, weight) if num_samples else ChunkPart(0, 1, 0, 0.0)

    def tail(self, num_samples: int) -> ChunkPart | None:
        """Returns this process's part of the tail of `num_samples` samples.

        None without a tail or if all parts are equal.
        """
        rest = num_samples % self.chunk_size
        if rest == 0 or self.num_processes == 1 or (self.even and rest % self.num_processes == 0):
            return None
        return self.part(rest)

    def batches(self, chunks: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Yields this process's part of each chunk."""
        return chunks if self.num_processes == 1 else map(self._take_part, chunks)

    def _take_part(self, chunk: list[Any]) -> list[Any]:
        part = self.part(len(chunk))
        return chunk[part.start : part.stop]

    def _bounds(self, size: int) -> tuple[int, int]:
        if self.even:
            small, larger = divmod(size, self.num_processes)
            start = self.rank * small + min(self.rank, larger)
            return start, start + small + int(self.rank < larger)
        return min(self.rank * self.batch_size, size), min((self.rank + 1) * self.batch_size, size)
