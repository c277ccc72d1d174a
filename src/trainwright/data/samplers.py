"""Orders of samples, and batches of indices from them that can start anywhere.

The shuffled order of an epoch is a pure function of (seed, epoch): the permutation that a fresh torch generator with
seed + epoch draws. A resume computes it and starts in the middle; nothing is read or drawn to get there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler

from trainwright.data.feistel import FeistelOrder
from trainwright.data.sample_seeding import EpochIndices
from trainwright.data.sharding import ChunkPart, RankShare
from trainwright.data.worker_seeding import SeededIndices
from trainwright.errors import DataError


class Order(Protocol):
    """The indices of an epoch, in order."""

    def indices(self, epoch: int) -> Iterable[int]: ...
    def __len__(self) -> int: ...


class ShuffledOrder:
    """A new permutation for each epoch, drawn from `seed + epoch`."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def indices(self, epoch: int) -> Iterable[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()


class SamplerOrder:
    """The order that a sampler gives; it may draw from the random generators of this process when an epoch starts."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def indices(self, epoch: int) -> Iterable[int]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return self.sampler  # type: ignore[no-any-return]


class EpochBatches(Sampler[list[int]]):
    """Batches of indices for one epoch at a time, those of one process; `seek` says which epoch and where in it.

    Args:
        order: gives the indices of an epoch, to all processes the same.
        batch_size: indices per batch.
        drop_last: leave out a last batch that is smaller, or that not every process could fill.
        worker_seed: base of the seeds that workers get with each batch; None leaves them alone.
        share: which part of the order is this process's; default all of it.
        tells_epoch: batches say of which epoch they are.
    """

    def __init__(
        self,
        order: Order,
        batch_size: int,
        *,
        drop_last: bool = False,
        worker_seed: int | None = None,
        share: RankShare | None = None,
        tells_epoch: bool = False,
    ) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.worker_seed = worker_seed
        self.share = RankShare(batch_size=batch_size) if share is None else share
        assert self.share.batch_size == batch_size
        self.tells_epoch = tells_epoch
        self.epoch = 0
        self.first_sample = 0
        self._drawn: Iterator[int] | None = None

    @property
    def sampler(self) -> Any:
        """What the order was made from; torch's DataLoader and others look for it here."""
        return getattr(self.order, "sampler", self.order)

    def seek(self, epoch: int, first_sample: int = 0) -> None:
        """The next iteration begins with this sample of the order (counted over all processes)."""
        self.epoch = epoch
        self.first_sample = first_sample

    def set_epoch(self, epoch: int) -> None:
        self.seek(epoch)

    def __len__(self) -> int:
        return self.num_batches()

    def num_batches(self, first_sample: int = 0) -> int:
        """Batches of an epoch from a sample on."""
        return self.share.num_batches(max(len(self.order) - first_sample, 0), drop_last=self.drop_last)

    def last_part(self, first_sample: int = 0) -> ChunkPart | None:
        """What the last batch holds of a tail that the processes share unevenly; None where all batches are full."""
        rest = max(len(self.order) - first_sample, 0) % self.share.chunk_size
        if rest == 0 or self.drop_last or self.share.num_processes == 1:
            return None
        part = self.share.part(rest)
        return None if rest % self.share.num_processes == 0 and self.share.even else part

    def draw(self) -> None:
        """Draws the order of the epoch now, not with the first batch: random states may be set in between."""
        if not isinstance(self.order, FeistelOrder):
            self._drawn = iter(list(self.order.indices(self.epoch)))

    def __iter__(self) -> Iterator[list[int]]:
        if isinstance(self.order, FeistelOrder):  # computes what it is asked for, so nothing has to be passed over
            indices = self.order.indices(self.epoch, self.first_sample)
        else:
            order, self._drawn = self._drawn or iter(self.order.indices(self.epoch)), None
            indices = itertools.islice(order, self.first_sample, None)
        share, chunk_size = self.share, self.share.chunk_size
        epoch, number, first = self.epoch, self.first_sample // chunk_size, self.first_sample
        self.epoch, self.first_sample = epoch + 1, 0  # a plain `for` loop over epochs gets a new order each time
        position = first
        is_counted = isinstance(self.order, SamplerOrder)  # the orders of our own making do as they say
        while batch := list(itertools.islice(indices, chunk_size)):
            position += len(batch)
            if is_counted:
                self._check_length(position)
            if len(batch) < chunk_size and self.drop_last:
                return
            if share.num_processes > 1:
                part = share.part(len(batch))
                batch = batch[part.start : part.stop]
            if self.tells_epoch:
                batch = EpochIndices(batch)
                batch.epoch = epoch
            elif self.worker_seed is not None:
                batch = SeededIndices(batch, (self.worker_seed, epoch, number * share.num_processes + share.rank))
            yield batch
            number += 1
        if is_counted and first < len(self.order):
            self._check_length(position, is_end=True)

    def _check_length(self, position: int, *, is_end: bool = False) -> None:
        """A sampler gives as many indices as it says."""
        num = len(self.order)
        if position > num or (is_end and position < num):
            raise DataError(
                f"The sampler says by len() that it has {num} indices, and gave {'' if is_end else 'at least '}"
                f"{position}. Let its __len__ return how many it gives: steps and epochs are counted by it."
            )
