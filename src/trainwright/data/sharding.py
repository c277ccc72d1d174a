"""Shares of an order: the samples of each process. Pure arithmetic; reads no data, sends no messages.

An order is cut into chunks of `num_processes * batch_size` samples, and process r takes part r of each chunk. Example,
two processes with batches of 3 over the order 0..13: chunks 0-5 and 6-11 are full, so process 0 trains on 012, 678 and
process 1 on 345, 9ab; the tail cd (two samples) is shared out evenly: c to process 0, d to process 1. Were the tail one
sample only, process 1 would get it again as a batch that stands in: it keeps the processes in step and weighs nothing.
So every process has the same number of batches, and every sample of the epoch counts once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from trainwright._types import DatasetLike, Item


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Positions of a chunk, from `start` to before `stop`, that fall to one process."""

    start: int
    stop: int
    num_samples: int  # of them count; 0 where a batch only stands in
    # by which a mean over the part is multiplied, so that the mean over all processes is that over the chunk
    weight: float


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

    def _bounds(self, size: int) -> tuple[int, int]:
        if self.even:
            small, larger = divmod(size, self.num_processes)
            start = self.rank * small + min(self.rank, larger)
            return start, start + small + int(self.rank < larger)
        return min(self.rank * self.batch_size, size), min((self.rank + 1) * self.batch_size, size)


# -- the original's samplers, by name; the trainer's own loaders use `Share` -------------------------------------------

# Any: datasets are the user's own types.


class ShardSampler(Sampler[int]):
    """Indices in order, whole batches to the processes in turn; the end is filled up from the beginning.

    Args:
        dataset: has a length.
        batch_size: of one process.
        drop_last: leave out the last indices, which do not make a batch for each process.
        num_processes: that share the indices.
        process_index: of this process.
    """

    def __init__(
        self,
        dataset: DatasetLike,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.total_batch_size = batch_size * num_processes
        rounds = len(dataset) / self.total_batch_size
        self.total_num_samples = (math.floor(rounds) if drop_last else math.ceil(rounds)) * self.total_batch_size

    def __iter__(self) -> Iterator[int]:
        first = self.batch_size * self.process_index
        for start in range(first, self.total_num_samples, self.total_batch_size):
            yield from (place % len(self.dataset) for place in range(start, start + self.batch_size))

    def __len__(self) -> int:
        return self.total_num_samples // self.num_processes


class IterableDatasetShard(IterableDataset[Item]):
    """One process's samples of a stream that all of them read; the last batch is filled up with the first one's.

    A stream that draws at random does so alike everywhere: from its `generator`, seeded with `seed + epoch`, or by a
    `set_epoch` of its own.

    Args:
        dataset: the stream.
        batch_size: of one process.
        drop_last: leave out the last samples, which do not make a batch for each process.
        num_processes: that read the stream.
        process_index: of this process.
        seed: of the stream's `generator`, where it has one.
    """

    def __init__(
        self,
        dataset: DatasetLike,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.seed = seed
        self.epoch = 0
        self.num_examples = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Item]:
        self.num_examples = 0
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.seed + self.epoch)
        size = self.batch_size * self.num_processes
        first = self.batch_size * self.process_index
        filling: list[Item] = []
        stream = iter(self.dataset)
        while batch := list(itertools.islice(stream, size)):
            self.num_examples += len(batch)
            filling = filling or list(batch)
            if len(batch) < size and self.drop_last:
                return
            whole = itertools.chain(batch, itertools.cycle(filling))
            yield from itertools.islice(whole, first, first + self.batch_size)

    def __len__(self) -> int:
        rounds = len(self.dataset) / (self.batch_size * self.num_processes)
        return (math.floor(rounds) if self.drop_last else math.ceil(rounds)) * self.batch_size


class DistributedSamplerWithLoop(DistributedSampler[int]):
    """torch's DistributedSampler, lengthened to whole batches with indices from its own beginning.

    Args:
        dataset: has a length.
        batch_size: of one process.
        kwargs: of torch's DistributedSampler.
    """

    def __init__(self, dataset: DatasetLike, batch_size: int, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        mine = list(super().__iter__())
        # A process that torch gave one sample more for evenness has its first one twice already.
        begin = int(self.rank < len(self.dataset) % self.num_replicas)  # type: ignore[arg-type]  # it has a length
        return iter(mine + mine[begin : begin + -len(mine) % self.batch_size])
