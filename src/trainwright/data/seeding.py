"""Seeds python's, numpy's and torch's generators: for the process, for loader workers, and for single samples.

With `seed_samples`, everything drawn for a sample is a function of (seed, epoch, sample), the same for any number of
workers: all generators are seeded before each sample is read, and again, from the first sample, before the batch is
collated. If the main process reads, the `Loader` restores its random states after each batch.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainwright._types import Batch, Item
from trainwright.data.collator_layers import CollatorLayer
from trainwright.data.epochs import set_epoch_in_worker
from trainwright.distributed.device import make_deterministic


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seeds `random`, numpy and torch on all devices.

    Args:
        seed: from 0 to 2**32 - 1.
        deterministic: also asks torch for deterministic algorithms.
    """
    random.seed(seed)
    np.random.seed(seed)
    if torch.accelerator.current_accelerator() is None:  # torch is built for the CPU alone
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)  # takes 0.4 ms, to store the seed for each kind of device
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seeds all generators and makes torch deterministic, at the cost of speed.

    Args:
        seed: seed of all generators.
        warn_only: warn instead of raising for an operation without a deterministic implementation.
    """
    set_seed(seed)
    make_deterministic()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)


@contextmanager
def drawing_apart(seed: int = 0) -> Iterator[None]:
    """Seeds the host's generators inside the block, and restores the states of the process afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def derive_seed(origin: Iterable[int]) -> int:
    """Returns a 32-bit seed that is a function of some numbers."""
    return int(np.random.SeedSequence([part % 2**64 for part in origin]).generate_state(1)[0])


def seed_from(origin: Iterable[int]) -> None:
    """Seeds all generators of this process with a function of some numbers."""
    set_seed(derive_seed(origin))


# -- workers ---------------------------------------------------------------------------------------------------------


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seeds a worker process from the seed that torch gave it, differently on each rank.

    Args:
        worker_id: worker id of torch's DataLoader; already part of torch's seed.
        num_workers: number of workers of each rank.
        rank: rank of the process that the worker belongs to.
    """
    set_seed((torch.initial_seed() % 2**32 + num_workers * rank) % 2**32)


class SeededIndices(list[int]):
    """Indices of a batch that seed the worker they are sent to.

    The worker is seeded on arrival, just before the samples are read: anything random in a sample or in the collator is
    then a function of (seed, epoch, batch), and the same after a resume. In the main process, this is a plain list.
    """

    def __init__(self, indices: Iterable[int], origin: tuple[int, int, int]) -> None:
        super().__init__(indices)
        self.origin = origin

    def __reduce__(self) -> tuple[Callable[..., list[int]], tuple[list[int], tuple[int, int, int]]]:
        return _seed_on_arrival, (list(self), self.origin)


def _seed_on_arrival(indices: list[int], origin: tuple[int, int, int]) -> list[int]:
    """Runs in the worker, when the indices are unpickled."""
    set_epoch_in_worker(origin[1])
    seed_from(origin)
    return indices


# -- samples ---------------------------------------------------------------------------------------------------------


class EpochIndices(list[Any]):  # indices of samples, or of groups of samples that form a batch
    """Indices of a batch with the number of their epoch."""

    def __init__(self, indices: Iterable[Any], epoch: int) -> None:
        super().__init__(indices)
        self.epoch = epoch


class SeededRows(list[Item]):
    """Samples of a batch on their way to the collator, with the numbers to seed it."""

    origin: tuple[int, ...]


class SeededItems(Dataset[Item]):
    """A dataset that seeds all generators before reading a sample."""

    def __init__(self, source: Item, seed: int) -> None:
        self.source = source
        self.seed = seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: object) -> Item:
        return self.source[index]

    def __getitems__(self, indices: Sequence[object]) -> SeededRows:
        epoch = indices.epoch if isinstance(indices, EpochIndices) else 0
        set_epoch_in_worker(epoch)
        rows = SeededRows()
        rows.origin = (self.seed, epoch, _number(indices[0]), 1)
        for index in indices:
            seed_from((self.seed, epoch, _number(index), 0))
            rows.append(self.source[index])
        return rows


class SeededCollator(CollatorLayer):
    """Seeds all generators, then calls the collator."""

    def __init__(self, data_collator: Callable[[list[Item]], Batch]) -> None:
        self.data_collator = data_collator

    def __call__(self, rows: list[Item]) -> Batch:
        if isinstance(rows, SeededRows):
            seed_from(rows.origin)
        batch: Batch = self.data_collator(list(rows))
        return batch


def _number(index: object) -> int:
    """Returns a number that represents an index or a group of samples."""
    return index if isinstance(index, int) else zlib.crc32(repr(index).encode())
