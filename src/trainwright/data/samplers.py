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

from trainwright.data.workers import SeededIndices


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
    """Batches of indices for one epoch at a time; `seek` says which epoch and where in it.

    Args:
        order: gives the indices of an epoch.
        batch_size: indices per batch.
        drop_last: leave out a last batch that is smaller.
        worker_seed: base of the seeds that workers get with each batch; None leaves them alone.
    """

    def __init__(
        self, order: Order, batch_size: int, *, drop_last: bool = False, worker_seed: int | None = None
    ) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.worker_seed = worker_seed
        self.epoch = 0
        self.first_sample = 0
        self._drawn: Iterator[int] | None = None

    @property
    def sampler(self) -> Any:
        """What the order was made from; torch's DataLoader and others look for it here."""
        return getattr(self.order, "sampler", self.order)

    def seek(self, epoch: int, first_sample: int = 0) -> None:
        self.epoch = epoch
        self.first_sample = first_sample

    def set_epoch(self, epoch: int) -> None:
        self.seek(epoch)

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.batch_size)
        return full + int(rest > 0 and not self.drop_last)

    def draw(self) -> None:
        """Draws the order of the epoch now, not with the first batch: random states may be set in between."""
        self._drawn = iter(list(self.order.indices(self.epoch)))

    def __iter__(self) -> Iterator[list[int]]:
        order, self._drawn = self._drawn or iter(self.order.indices(self.epoch)), None
        indices = itertools.islice(order, self.first_sample, None)
        epoch, number = self.epoch, self.first_sample // self.batch_size
        self.epoch, self.first_sample = epoch + 1, 0  # a plain `for` loop over epochs gets a new order each time
        while batch := list(itertools.islice(indices, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            yield batch if self.worker_seed is None else SeededIndices(batch, (self.worker_seed, epoch, number))
            number += 1
