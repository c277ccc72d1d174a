"""Orders of samples, and batches of indices from them that can start anywhere.

The shuffled order of an epoch is a pure function of (seed, epoch): the permutation that a fresh torch generator with
seed + epoch draws. A resume computes it and starts in the middle; nothing is read or drawn to get there.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from trainwright.data.cursor import OrderKind
from trainwright.data.quarantine import substituted
from trainwright.data.seeding import EpochIndices, SeededIndices
from trainwright.data.sharding import ChunkPart, RankShare
from trainwright.errors import DataError


class Order(ABC):
    """The indices of each epoch, of samples or of groups of them."""

    seed: int | None = None  # base of the order; None where it comes from elsewhere
    unit: str | None = None  # the settings that decide what a group is; None for an index of a single sample
    is_counted = False  # its length is a claim that is checked against what it gives

    @abstractmethod
    def indices(self, epoch: int) -> Iterable[Any]:
        """The indices of an epoch, in order."""

    @abstractmethod
    def __len__(self) -> int:
        """Indices in an epoch, the same number in each."""

    @abstractmethod
    def describe(self) -> OrderKind:
        """Everything that the order depends on besides seed and epoch; lies in checkpoints."""

    def indices_from(self, epoch: int, first: int) -> Iterator[Any]:
        """The indices of an epoch from position `first` on."""
        return itertools.islice(self.indices(epoch), first, None)

    def draw(self, epoch: int) -> Iterator[Any] | None:
        """The indices of an epoch, where random numbers of this process decide them; None where they do not."""
        return None


class ShuffledOrder(Order):
    """A new permutation for each epoch, drawn from `seed + epoch`."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed: int = seed

    def __len__(self) -> int:
        return self.num_samples

    def indices(self, epoch: int) -> Iterable[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def describe(self) -> OrderKind:
        return {"kind": "permutation"}


class SamplerOrder(Order):
    """The order that a sampler gives; it may draw from the random generators of this process when an epoch starts."""

    is_counted = True

    def __init__(self, sampler: Any, describe: Callable[[], OrderKind] | None = None) -> None:
        self.sampler = sampler  # has a length and can be iterated once per epoch
        self._describe = describe  # returns the kind of the order; default: the name of the sampler's class
        self._kind: OrderKind | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def indices(self, epoch: int) -> Iterable[int]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return self.sampler  # type: ignore[no-any-return]

    def draw(self, epoch: int) -> Iterator[int]:
        return iter(list(self.indices(epoch)))

    def describe(self) -> OrderKind:
        if self._kind is None:
            name = type(self.sampler).__qualname__
            self._kind = {"kind": "sampler", "sampler": name} if self._describe is None else self._describe()
        return self._kind


class EpochBatches(Sampler[list[int]]):
    """Batches of indices for one epoch at a time, those of one process; `seek` says which epoch and where in it."""

    def __init__(
        self,
        order: Order,
        batch_size: int,
        *,
        drop_last: bool = False,
        worker_seed: int | None = None,
        share: RankShare | None = None,
    ) -> None:
        self.order = order  # gives the indices of an epoch, to all processes the same
        self.batch_size = batch_size  # indices per batch
        self.drop_last = drop_last  # leave out a last batch that is smaller, or that not every process could fill
        self.worker_seed = worker_seed  # base of the seeds that workers get with each batch; None leaves them alone
        # which part of the order is this process's; default all of it
        self.share = RankShare(batch_size=batch_size) if share is None else share
        assert self.share.batch_size == batch_size
        self.tells_epoch = False  # batches say of which epoch they are
        self.substitutes: dict[int, int] = {}  # samples in quarantine, and those that take their places
        self.epoch = 0
        self.first_sample = 0
        self._drawn: Iterator[int] | None = None
        self._finished: tuple[int, Order] = (-1, order)  # an epoch, and the order in which it was begun

    @property
    def sampler(self) -> Any:
        """Sampler that the order was made from; torch's DataLoader and others look for it here."""
        return getattr(self.order, "sampler", self.order)

    def seek(self, epoch: int, first_sample: int = 0) -> None:
        """The next iteration begins with this sample of the order (counted over all processes)."""
        self.epoch = epoch
        self.first_sample = first_sample

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its first sample on."""
        self.seek(epoch)

    def finish(self, epoch: int, order: Order) -> None:
        """One epoch keeps the order in which it was begun; all others have this one's."""
        assert len(order) == len(self.order)
        self._finished = (epoch, order)

    def order_of(self, epoch: int) -> Order:
        """The order of an epoch."""
        return self._finished[1] if epoch == self._finished[0] else self.order

    def __len__(self) -> int:
        return self.num_batches()

    def num_batches(self, first_sample: int = 0) -> int:
        """Batches of an epoch from a sample on."""
        return self.share.num_batches(max(len(self.order) - first_sample, 0), drop_last=self.drop_last)

    def last_part(self, first_sample: int = 0) -> ChunkPart | None:
        """Returns this process's part of a tail that is shared unevenly; None where all batches are full."""
        rest = max(len(self.order) - first_sample, 0) % self.share.chunk_size
        if rest == 0 or self.drop_last or self.share.num_processes == 1:
            return None
        part = self.share.part(rest)
        return None if rest % self.share.num_processes == 0 and self.share.even else part

    def indices_of(self, epoch: int, first_sample: int, num_batches: int) -> list[list[Any]]:
        """Returns the indices of some batches of this process; none where making the order draws random numbers.

        Args:
            epoch: from 0.
            first_sample: of the first batch, counted over all processes.
            num_batches: so many, or fewer at the end of the epoch.
        """
        order, share = self.order_of(epoch), self.share
        if type(order).draw is not Order.draw and order.describe()["kind"] != "sequence":
            return []
        indices = order.indices_from(epoch, first_sample)
        chunks = [list(itertools.islice(indices, share.chunk_size)) for _ in range(num_batches)]
        parts = [share.part(len(chunk)) for chunk in chunks if chunk]
        return [chunk[part.start : part.stop] for chunk, part in zip(chunks, parts, strict=False)]

    def draw(self) -> None:
        """Draws the order of the epoch now, not with the first batch: random states may be set in between."""
        self._drawn = self.order_of(self.epoch).draw(self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order, drawn = self.order_of(self.epoch), self._drawn
        self._drawn = None
        if drawn is not None:
            indices: Iterator[int] = itertools.islice(drawn, self.first_sample, None)
        else:
            indices = order.indices_from(self.epoch, self.first_sample)
        share, chunk_size = self.share, self.share.chunk_size
        epoch, number, first = self.epoch, self.first_sample // chunk_size, self.first_sample
        self.epoch, self.first_sample = epoch + 1, 0  # a plain `for` loop over epochs gets a new order each time
        position, is_counted = first, order.is_counted
        while batch := list(itertools.islice(indices, chunk_size)):
            position += len(batch)
            if is_counted:
                self._check_length(position)
            if len(batch) < chunk_size and self.drop_last:
                return
            if share.num_processes > 1:
                part = share.part(len(batch))
                batch = batch[part.start : part.stop]
            if self.substitutes:
                batch = [substituted(index, self.substitutes) for index in batch]
            if self.tells_epoch:
                batch = EpochIndices(batch, epoch)
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
