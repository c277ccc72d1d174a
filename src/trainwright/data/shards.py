"""Chunks of an order, each a batch of all processes together, and the part of a chunk that falls to one process.

An order is cut into chunks of `num_processes * batch_size` samples, and process r takes part r of each chunk. Example,
two processes with batches of 3 over the order 0..13: chunks 0-5 and 6-11 are full, so process 0 trains on 012, 678 and
process 1 on 345, 9ab; the tail cd (two samples) is shared out evenly: c to process 0, d to process 1. Were the tail one
sample only, process 1 would get it again as a batch that stands in: it keeps the processes in step and weighs nothing.
So every process has the same number of batches, and every sample of the epoch counts once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Positions of a chunk, from `start` to before `stop`, that fall to one process."""

    start: int
    stop: int
    num_samples: int  # of them count; 0 where a batch only stands in
    # by which a mean over the part is multiplied, so that the mean over all processes is that over the chunk
    weight: float


def in_chunks(indices: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Cuts what an iterator gives into lists of `size`; the last one may be shorter. Built without calls of its own."""
    chunks = map(list, map(itertools.islice, itertools.repeat(indices), itertools.repeat(size)))
    return itertools.takewhile(bool, chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One process among those that share an order."""

    batch_size: int  # samples of a full batch on each process
    rank: int = 0
    num_processes: int = 1
    # a tail is split into parts that differ by one sample at most; otherwise the first processes get full batches, the
    # next one what is left, and the others stand in
    even: bool = True

    @property
    def chunk_size(self) -> int:
        """Samples in a batch of all processes."""
        return self.batch_size * self.num_processes

    def num_batches(self, num_samples: int, *, drop_last: bool) -> int:
        """Batches that each process makes of so many samples."""
        full, rest = divmod(num_samples, self.chunk_size)
        return full + int(rest > 0 and not drop_last)

    def part(self, size: int) -> ChunkPart:
        """This process's part of a chunk of `size` samples (at least one)."""
        start, stop = self._bounds(size)
        num_samples = stop - start
        weight = num_samples * self.num_processes / size
        return ChunkPart(start, stop, num_samples, weight) if num_samples else ChunkPart(0, 1, 0, 0.0)

    def tail(self, num_samples: int) -> ChunkPart | None:
        """This process's part of the tail of so many samples; None where there is no tail, or all parts are equal."""
        rest = num_samples % self.chunk_size
        if rest == 0 or self.num_processes == 1 or (self.even and rest % self.num_processes == 0):
            return None
        return self.part(rest)

    def batches(self, chunks: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Returns the part of this process of each chunk."""
        return chunks if self.num_processes == 1 else map(self._part_of, chunks)

    def _part_of(self, chunk: list[Any]) -> list[Any]:
        part = self.part(len(chunk))
        return chunk[part.start : part.stop]

    def _bounds(self, size: int) -> tuple[int, int]:
        if self.even:
            small, larger = divmod(size, self.num_processes)
            start = self.rank * small + min(self.rank, larger)
            return start, start + small + int(self.rank < larger)
        return min(self.rank * self.batch_size, size), min((self.rank + 1) * self.batch_size, size)
