"""The original's samplers that give each process its part, by name. Our loaders use `data/sharding.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler


class ShardSampler(Sampler[int]):
    """Indices in order, whole batches to the processes in turn; what is missing in the end comes from the beginning."""

    def __init__(
        self,
        dataset: Sized,
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


class IterableDatasetShard(IterableDataset[Any]):
    """One process's samples of a stream that all of them read; the last batch is filled up with the first one's.

    A stream that draws at random does so alike everywhere: from its `generator`, seeded with `seed + epoch`, or by a
    `set_epoch` of its own.
    """

    def __init__(
        self,
        dataset: Any,  # the user's: iterable, and perhaps with a length
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

    def __iter__(self) -> Iterator[Any]:
        self.num_examples = 0
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.seed + self.epoch)
        size = self.batch_size * self.num_processes
        first = self.batch_size * self.process_index
        filling: list[object] = []
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


class DistributedSamplerWithLoop(DistributedSampler[Any]):
    """torch's DistributedSampler, lengthened to whole batches with indices from its own beginning."""

    def __init__(self, dataset: Any, batch_size: int, **kwargs: Any) -> None:  # as DistributedSampler takes them
        super().__init__(dataset, **kwargs)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        mine = list(super().__iter__())
        # A process that torch gave one sample more for evenness has its first one twice already.
        begin = int(self.rank < len(self.dataset) % self.num_replicas)  # type: ignore[arg-type]  # it has a length
        return iter(mine + mine[begin : begin + -len(mine) % self.batch_size])
