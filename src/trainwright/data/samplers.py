"""Orders of samples, and batches of indices from them that can start anywhere.

The shuffled order of an epoch is a pure function of (seed, epoch): the permutation that a fresh torch generator with
seed + epoch draws. A resume computes it and starts in the middle; nothing is read or drawn to get there.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler, SequentialSampler

from trainwright.data.cursor import OrderKind
from trainwright.data.quarantine import substitutes, without
from trainwright.data.seeding import EpochIndices, SeededIndices
from trainwright.data.sharding import ChunkPart, RankShare

logger = logging.getLogger(__name__)


class Order(ABC):
    """The indices of each epoch, of samples or of groups of them."""

    seed: int | None = None  # base of the order; None where it comes from elsewhere
    unit: str | None = None  # the settings that decide what a group is; None for an index of a single sample
    is_counted = False  # its length is a claim that is compared with what it gives
    is_permutation = False  # an epoch has each sample once, in an order that can be computed at any time

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

    is_permutation = True

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
        self.is_permutation = isinstance(sampler, range) or type(sampler) is SequentialSampler
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
        self._left_out: frozenset[int] = frozenset()  # samples in quarantine
        self._substitutes: dict[int, int] = {}  # and those that take their places where these stay
        self._begun = (-1, self._left_out)  # the epoch that was begun last, and what was left out of all of it
        self._before = self._left_out  # and what of the one before it
        self._places: tuple[object, list[int]] = (None, [])  # of what is left out of one epoch; made when asked for
        self.epoch = 0
        self.first_sample = 0
        self._has_warned = False
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
        self._finished, self._places = (epoch, order), (None, [])

    def order_of(self, epoch: int) -> Order:
        """The order of an epoch."""
        return self._finished[1] if epoch == self._finished[0] else self.order

    def leave_out(self, samples: Collection[int], num_samples: int) -> None:
        """Leaves samples out of the epochs that begin now, and does not fetch them any more in one that has begun.

        Args:
            samples: indices in the dataset.
            num_samples: of the dataset.

        Raises:
            DataError: none would be left.
        """
        self._substitutes = substitutes(samples, num_samples)
        self._left_out = frozenset(self._substitutes)

    @property
    def num_left_out(self) -> int:
        """Samples by which the next epochs are shorter."""
        return len(self._left_out) if self.order.is_permutation else 0

    def left_out_of(self, epoch: int) -> frozenset[int]:
        """Samples by which an epoch is shorter."""
        if not self.order_of(epoch).is_permutation:
            return frozenset()
        return self._begun[1] if epoch == self._begun[0] else self._left_out

    def places_left_out(self, epoch: int) -> list[int]:
        """Their positions in its order, in order."""
        left_out = self.left_out_of(epoch)
        if not left_out:
            return []
        if self._places[0] != (epoch, left_out):
            indices = self.order_of(epoch).indices(epoch)
            self._places = (epoch, left_out), [place for place, index in enumerate(indices) if index in left_out]
        return self._places[1]

    def num_kept(self, epoch: int, before: int) -> int:
        """Samples before a position of an epoch that are not left out."""
        return before - bisect_left(self.places_left_out(epoch), before)

    def place_after(self, epoch: int, num_kept: int) -> int:
        """The position after so many samples of an epoch that are not left out."""
        position = num_kept
        for place in self.places_left_out(epoch) if num_kept > 0 else ():
            if place > position:
                break
            position += 1
        return position

    def __len__(self) -> int:
        return self.share.num_batches(len(self.order) - self.num_left_out, drop_last=self.drop_last)

    def num_left(self, first_sample: int, epoch: int) -> int:
        """Samples of an epoch from a position on."""
        kept = self.num_kept(epoch, first_sample) if first_sample > 0 else 0
        return max(len(self.order) - len(self.left_out_of(epoch)) - kept, 0)

    def num_batches(self, first_sample: int = 0, epoch: int | None = None) -> int:
        """Batches of an epoch from a position on; default the next one that is iterated."""
        num = self.num_left(first_sample, self.epoch if epoch is None else epoch)
        return self.share.num_batches(num, drop_last=self.drop_last)

    def last_part(self, first_sample: int = 0) -> ChunkPart | None:
        """Returns this process's part of a tail that is shared unevenly; None where all batches are full."""
        rest = self.num_left(first_sample, self.epoch) % self.share.chunk_size
        if rest == 0 or self.drop_last or self.share.num_processes == 1:
            return None
        part = self.share.part(rest)
        return None if rest % self.share.num_processes == 0 and self.share.even else part

    def indices_of(self, epoch: int, first_sample: int, num_batches: int) -> list[list[Any]]:
        """Returns the indices of some batches of this process; none where making the order draws random numbers.

        Nor are there any of an epoch that ended before others were left out, and of a batch with substitutes.

        Args:
            epoch: from 0.
            first_sample: of the first batch, counted over all processes.
            num_batches: so many, or fewer at the end of the epoch.
        """
        order, share = self.order_of(epoch), self.share
        if type(order).draw is not Order.draw and not order.is_permutation:
            return []
        if epoch < self._begun[0] and self._before != self._begun[1]:
            return []
        left_out = self.left_out_of(epoch)
        indices = (one for one in order.indices_from(epoch, first_sample) if not left_out or one not in left_out)
        chunks = [list(itertools.islice(indices, share.chunk_size)) for _ in range(num_batches)]
        parts = [share.part(len(chunk)) for chunk in chunks if chunk]
        batches = [chunk[part.start : part.stop] for chunk, part in zip(chunks, parts, strict=False)]
        return batches if not self._left_out else [[] if self._lacks(batch) else batch for batch in batches]

    def _lacks(self, batch: list[Any]) -> bool:
        """Returns True if samples of a batch are left out of it, or were when it was fetched."""
        return any(self._substituted(index, 0) != index for index in batch)

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
        epoch, first = self.epoch, self.first_sample
        if epoch != self._begun[0]:
            self._begun, self._before = (epoch, self._left_out), self._begun[1]
        left_out = self.left_out_of(epoch)
        number = (self.num_kept(epoch, first) if left_out and first > 0 else first) // chunk_size
        self.epoch, self.first_sample = epoch + 1, 0  # a plain `for` loop over epochs gets a new order each time
        if left_out:
            indices = (index for index in indices if index not in left_out)
        position, is_counted = first, order.is_counted and not left_out
        while batch := list(itertools.islice(indices, chunk_size)):
            position += len(batch)
            if is_counted:
                self._check_length(position)
            if len(batch) < chunk_size and self.drop_last:
                return
            if share.num_processes > 1:
                part = share.part(len(batch))
                batch = batch[part.start : part.stop]
            if self._substitutes:
                batch = [self._substituted(index, epoch) for index in batch]
            if self.tells_epoch:
                batch = EpochIndices(batch, epoch)
            elif self.worker_seed is not None:
                batch = SeededIndices(batch, (self.worker_seed, epoch, number * share.num_processes + share.rank))
            yield batch
            number += 1
        if is_counted and first < len(self.order):
            self._check_length(position, is_end=True)

    def _substituted(self, index: Any, epoch: int) -> Any:  # Any: of a sample, or a group of them
        """Returns what takes the place of an index; of a group that would be empty, another one of its epoch."""
        if not isinstance(index, list):
            return self._substitutes.get(index, index)
        groups = itertools.chain([index], self.order_of(epoch).indices(epoch))
        return next(kept for group in groups if (kept := without(group, self._left_out)))

    def _check_length(self, position: int, *, is_end: bool = False) -> None:
        """Warns once of a sampler that gives another number of indices than it says."""
        num = len(self.order)
        if not self._has_warned and (position > num or (is_end and position < num)):
            self._has_warned = True
            seen, effect = f"at least {position}", "ends before the sampler does"
            if is_end:
                seen, effect = str(position), "ends early, and the run may end before its last step"
            logger.warning(
                "The sampler says by len() that it has %d indices, and gave %s. Steps and epochs are counted by len(): "
                "an epoch %s. Let its __len__ return how many it gives.",
                num, seen, effect,
            )  # fmt: skip
