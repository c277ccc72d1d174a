"""Batches of indices for one process, by epoch and from any position: an order, filtered, chunked and distributed.

    order     the indices of an epoch from a position on          (`order.py`)
    filter    without the samples that are left out               (`filter.py`)
    chunks    a batch of all processes at a time                  (`shards.py`)
    shards    the part of this process                            (`shards.py`; or the filter, if it shrinks batches)
    batches   the parts one after another, marked for workers   (here)

Each stage iterates over the previous one; nothing is read ahead.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch.utils.data import Sampler

from trainwright.data.filter import Filter, make_filter
from trainwright.data.order import Order
from trainwright.data.sample_filter import EVERY_SAMPLE, SampleFilter
from trainwright.data.seeding import EpochIndices, SeededIndices
from trainwright.data.shards import ChunkPart, RankShare, in_chunks

logger = logging.getLogger(__name__)

# Any: an index into the user's dataset, or a group of indices.
Indices: TypeAlias = "list[Any]"
# (batch, epoch, number of the batch among all processes) -> batch as sent to the dataset.
Mark: TypeAlias = "Callable[[Indices, int, int], Indices]"


class EpochBatches(Sampler[Indices]):
    """Batches of indices of one process, an epoch at a time; `seek` sets the epoch and the position in it.

    Args:
        order: yields the indices of an epoch, the same for all processes.
        batch_size: indices of a batch.
        drop_last: drop a last batch that is smaller, or that some process could not fill.
        share: this process's part of the order; default all of it.
        mark: adds information for workers to a batch; None adds nothing.

    Attributes:
        noted: queue of the batches yielded by the next iteration; None if unused.
        ahead: queue of the chunks of the next iteration, if their order cannot be recomputed; None if unused.
        sample_filter: which samples are left out.
        parts: this process's parts of unevenly divided chunks, by chunk number from 1; filled by an iteration.
    """

    def __init__(
        self,
        order: Order,
        batch_size: int,
        *,
        drop_last: bool = False,
        share: RankShare | None = None,
        mark: Mark | None = None,
    ) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.share = RankShare(batch_size=batch_size) if share is None else share
        assert self.share.batch_size == batch_size
        self.noted: deque[Indices] | None = None
        self.ahead: deque[Indices] | None = None
        self.parts: dict[int, ChunkPart] = {}
        self.epoch = 0
        self.first_sample = 0
        self._mark = mark
        self.sample_filter: SampleFilter = EVERY_SAMPLE
        self._substitutes: Mapping[int, int] = {}
        self._filter = make_filter(order, self._substitutes)
        self._finished_epoch = -1  # an epoch that keeps the order it was begun in
        self._finished_filter = self._filter
        self._source: Iterator[Any] = iter(())  # the rest of the current epoch's order
        self._prepared: Iterator[Any] | None = None  # indices of the next iteration, if already drawn
        self._has_warned = False

    @property
    def sampler(self) -> Any:
        """The sampler behind the order; torch's DataLoader and other libraries look for it here."""
        return getattr(self.order, "sampler", self.order)

    # -- epoch and position
    # ---------------------------------------------------------------------------------------------

    def seek(self, epoch: int, first_sample: int = 0) -> None:
        """Starts the next iteration at this sample of the order (counted over all processes)."""
        self.epoch = epoch
        self.first_sample = first_sample

    def set_epoch(self, epoch: int) -> None:
        """Starts the next iteration at the first sample of this epoch."""
        self.seek(epoch)

    def finish(self, epoch: int, order: Order) -> None:
        """Lets one epoch keep the order it was begun in; all others use the current order."""
        assert len(order) == len(self.order)
        self._finished_epoch = epoch
        self._finished_filter = make_filter(order, self._substitutes)

    def order_epoch(self, epoch: int) -> Order:
        """Returns the order of an epoch."""
        return self.make_filter(epoch).order

    def make_filter(self, epoch: int) -> Filter:
        """Returns the order of an epoch without the excluded samples."""
        return self._finished_filter if epoch == self._finished_epoch else self._filter

    # -- excluded samples ----------------------------------------------------------------------------------------------

    def exclude(self, sample_filter: SampleFilter, num_samples: int) -> None:
        """Excludes samples from the batches of the next iteration; replaces an earlier selection."""
        self._substitutes = sample_filter.find_substitutes(num_samples, self.order.source_starts)
        self.sample_filter = sample_filter
        self._filter = self._filter.excluding(self._substitutes)
        self._finished_filter = self._finished_filter.excluding(self._substitutes)

    @property
    def excluded(self) -> frozenset[int]:
        """The excluded samples."""
        return frozenset(self._substitutes)

    @property
    def num_missing(self) -> int:
        """Number of excluded samples by which the next epochs are shorter."""
        return self._filter.num_missing

    # -- counting ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.share.num_batches(len(self.order) - self.num_missing, drop_last=self.drop_last)

    def num_left(self, first_sample: int, epoch: int) -> int:
        """Returns the number of samples of an epoch from a position on."""
        kept = self.make_filter(epoch)
        return max(len(self.order) - kept.num_missing - kept.num_kept(epoch, first_sample), 0)

    def num_batches(self, first_sample: int = 0, epoch: int | None = None) -> int:
        """Returns the number of batches of an epoch from a position on; by default for the next iteration's epoch."""
        num = self.num_left(first_sample, self.epoch if epoch is None else epoch)
        return self.share.num_batches(num, drop_last=self.drop_last)

    def last_part(self, first_sample: int = 0) -> ChunkPart | None:
        """Returns this process's part of an unevenly divided tail; None if all batches are full."""
        return None if self.drop_last else self.share.tail(self.num_left(first_sample, self.epoch))

    def uneven_parts(self) -> dict[int, ChunkPart] | None:
        """Returns the parts of unevenly divided chunks in the next iteration, by number from 1; None if there are none.

        If batches lose samples, they are not known in advance: each is added when its batch is yielded.
        """
        if self.make_filter(self.epoch).loses_samples:
            return self.parts
        tail = self.last_part(self.first_sample)
        return None if tail is None else {self.num_batches(self.first_sample): tail}

    # -- iterating -----------------------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draws the order of the epoch now, not with the first batch: random states may be set in between."""
        if self._prepared is None:
            drawn = self.order_epoch(self.epoch).draw(self.epoch)
            self._prepared = None if drawn is None else itertools.islice(drawn, self.first_sample, None)

    def save_remaining(self) -> None:
        """Starts the next iteration with the indices in `ahead`, if the order cannot be recomputed."""
        if self.ahead is not None:
            self._prepared = itertools.chain(list(itertools.chain.from_iterable(self.ahead)), self._source)

    def computed(self, epoch: int, first: int) -> Iterator[Indices]:
        """Returns the batches of an epoch from a position on, apart from any iteration.

        Empty if their order is drawn.
        """
        kept = self.make_filter(epoch)
        if not kept.order.is_computable:
            return iter(())
        indices = kept.indices(kept.order.indices_from(epoch, first))
        return kept.batches(self._in_chunks(indices), self.share, epoch=epoch, parts={})

    def __iter__(self) -> Iterator[Indices]:
        noted = self.noted
        ahead = self.ahead
        self.noted = None  # `noted` belongs to this iteration only
        epoch = self.epoch
        first = self.first_sample
        self.seek(epoch + 1)  # a plain `for` loop over epochs gets a new order each time
        kept = self.make_filter(epoch)
        prepared = self._prepared
        self._prepared = None
        self.parts.clear()
        indices = kept.order.indices_from(epoch, first) if prepared is None else prepared
        self._source = kept.indices(indices)
        is_checked = kept.order.is_counted and kept.num_missing == 0
        chunks = self._in_chunks(self._source, check_from=first if is_checked else None)
        if ahead is not None:
            chunks = _noted(chunks, ahead)
        number = kept.num_kept(epoch, first) // self.share.chunk_size  # number of earlier batches
        batches = kept.batches(chunks, self.share, epoch=epoch, parts=self.parts)
        for batch in batches:
            if noted is not None:
                noted.append(batch)
            yield batch if self._mark is None else self._mark(batch, epoch, number)
            number += 1

    def _in_chunks(self, indices: Iterator[Any], *, check_from: int | None = None) -> Iterator[Indices]:
        """Cuts indices into chunks.

        `check_from` is the position of the first index if their number is to be checked.
        """
        size = self.share.chunk_size
        chunks = in_chunks(indices, size)
        if check_from is not None:
            chunks = self._counted(chunks, check_from)
        if self.drop_last:
            chunks = itertools.takewhile(lambda chunk: len(chunk) == size, chunks)
        return chunks

    def _counted(self, chunks: Iterator[Indices], position: int) -> Iterator[Indices]:
        """Yields chunks. Warns once if a sampler yields a different number of indices than its length."""
        num = len(self.order)
        begins_within = position < num
        for chunk in chunks:
            position += len(chunk)
            if position > num:
                self._warn(f"at least {position}", "ends before the sampler does")
            yield chunk
        if begins_within and position < num:
            self._warn(str(position), "ends early, and the run may end before its last step")

    def _warn(self, given: str, effect: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "The len() of the sampler is %d, but it yielded %s indices. Steps and epochs are counted by len(), so "
            "an epoch %s. Make __len__ return the number of indices.",
            len(self.order),
            given,
            effect,
        )


def _noted(chunks: Iterator[Indices], ahead: deque[Indices]) -> Iterator[Indices]:
    for chunk in chunks:
        ahead.append(chunk)
        yield chunk


def marks_epoch(batch: Indices, epoch: int, number: int) -> Indices:
    """A `Mark` that sends the epoch, if samples are seeded one by one."""
    return EpochIndices(batch, epoch)


class MarksSeed:
    """A `Mark` that seeds a worker with each batch, as a function of the seed, the epoch and the batch.

    Args:
        seed: base of the seeds.
        share: the process that these batches belong to.
        has_epochs: False for an evaluation, whose batches have the same seeds each time.
    """

    def __init__(self, seed: int, share: RankShare, *, has_epochs: bool = True) -> None:
        self._seed = seed
        self._share = share
        self._has_epochs = has_epochs

    def __call__(self, batch: Indices, epoch: int, number: int) -> Indices:
        place = number * self._share.num_processes + self._share.rank
        return SeededIndices(batch, (self._seed, epoch if self._has_epochs else 0, place))
