"""Filters: what becomes of an order where samples are in quarantine. Each kind of order has one kind of filter.

- `ShorterEpochs`, where each sample comes once: excluded samples are passed over, and an epoch is shorter by them.
- `SmallerBatches`, where the order is a sampler's or one of groups: batches lose the samples, and stay as many.
- `SameShares`, where sources have shares: another sample of the same source takes the place.

A position in an epoch always counts the samples of the whole order, those that are passed over included.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from trainwright.data.order import Exclusion, Order
from trainwright.data.quarantine import without
from trainwright.data.shards import ChunkPart, RankShare

# Any: an index is of the user's dataset, or a group of indices.


class Filter(ABC):
    """An order without the excluded samples.

    Args:
        order: of all samples.
        substitutes: which sample takes the place of each excluded one.
    """

    def __init__(self, order: Order, substitutes: Mapping[int, int]) -> None:
        self.order = order
        self.substitutes = substitutes

    @property
    def excluded(self) -> Collection[int]:
        """The excluded samples."""
        return self.substitutes.keys()

    @property
    def num_missing(self) -> int:
        """Samples by which an epoch is shorter."""
        return 0

    @property
    def loses_samples(self) -> bool:
        """True if batches become smaller, and stay as many."""
        return False

    def indices(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Returns the indices of an epoch that are put into batches."""
        return indices

    def excluding(self, substitutes: Mapping[int, int]) -> Filter:
        """Returns the filter of the same order without other samples; an epoch under way keeps this one."""
        return filter_of(self.order, substitutes)

    @abstractmethod
    def batches(
        self, chunks: Iterator[list[Any]], share: RankShare, *, epoch: int, parts: dict[int, ChunkPart]
    ) -> Iterator[list[Any]]:
        """Returns this process's batches of an epoch's chunks; `parts` gets those that are shared unevenly, from 1."""

    def num_kept(self, epoch: int, before: int) -> int:
        """Samples before a position of an epoch that are not passed over."""
        return before

    def place_after(self, epoch: int, num_kept: int) -> int:
        """The position after so many samples of an epoch that are not passed over."""
        return num_kept


class KeepsAll(Filter):
    """No sample is excluded."""

    def batches(
        self, chunks: Iterator[list[Any]], share: RankShare, *, epoch: int, parts: dict[int, ChunkPart]
    ) -> Iterator[list[Any]]:
        return share.batches(chunks)


class ShorterEpochs(Filter):
    """Excluded samples are passed over. The order is computed once for the positions of an epoch, when asked."""

    def __init__(self, order: Order, substitutes: Mapping[int, int]) -> None:
        super().__init__(order, substitutes)
        self._epoch = -1  # that of `_places`
        self._places: Sequence[int] = ()  # positions that are passed over, in order

    @property
    def num_missing(self) -> int:
        return len(self.substitutes)

    def indices(self, indices: Iterator[Any]) -> Iterator[Any]:
        return (index for index in indices if index not in self.substitutes)

    def batches(
        self, chunks: Iterator[list[Any]], share: RankShare, *, epoch: int, parts: dict[int, ChunkPart]
    ) -> Iterator[list[Any]]:
        return share.batches(chunks)

    def num_kept(self, epoch: int, before: int) -> int:
        if before <= 0:
            return before
        return before - bisect_left(self._passed_over(epoch), before)

    def place_after(self, epoch: int, num_kept: int) -> int:
        position = num_kept
        if num_kept <= 0:
            return position
        for place in self._passed_over(epoch):
            if place > position:
                break
            position += 1
        return position

    def _passed_over(self, epoch: int) -> Sequence[int]:
        if epoch != self._epoch:
            indices = enumerate(self.order.indices(epoch))
            self._places = [place for place, index in indices if index in self.substitutes]
            self._epoch = epoch
        return self._places


class SameShares(Filter):
    """The next sample of the same source takes the place of an excluded one; a group loses it.

    No sample moves to another batch, so an epoch under way has other samples excluded at once.
    """

    def excluding(self, substitutes: Mapping[int, int]) -> Filter:
        self.substitutes = substitutes
        return self

    def batches(
        self, chunks: Iterator[list[Any]], share: RankShare, *, epoch: int, parts: dict[int, ChunkPart]
    ) -> Iterator[list[Any]]:
        for batch in share.batches(chunks):
            yield [instead_of(index, self, epoch) for index in batch] if self.substitutes else batch


class SmallerBatches(Filter):
    """Batches lose the excluded samples. What is left of a chunk is shared out among the processes like a tail."""

    @property
    def loses_samples(self) -> bool:
        return True

    def batches(
        self, chunks: Iterator[list[Any]], share: RankShare, *, epoch: int, parts: dict[int, ChunkPart]
    ) -> Iterator[list[Any]]:
        for number, chunk in enumerate(chunks, start=1):
            kept = without(chunk, self.excluded)
            part = share.part(len(kept)) if kept else STANDS_IN
            if not kept:  # a batch that stands in, so that there are as many
                kept = [instead_of(chunk[0], self, epoch)]
            is_tail = len(kept) < share.chunk_size and not share.even
            if part.num_samples == 0 or len(kept) % share.num_processes or is_tail:
                parts[number] = part
            yield kept[part.start : part.stop]


STANDS_IN = ChunkPart(start=0, stop=1, num_samples=0, weight=0.0)


def instead_of(index: Any, kept: Filter, epoch: int) -> Any:
    """Returns what takes the place of an index; of a group that would be empty, another one of its epoch."""
    if not isinstance(index, list):
        return kept.substitutes.get(index, index)
    groups = itertools.chain([index], kept.order.indices(epoch))
    return next(rest for group in groups if (rest := without(group, kept.excluded)))


def filter_of(order: Order, substitutes: Mapping[int, int]) -> Filter:
    """Returns the filter of an order."""
    if order.exclusion is Exclusion.SAME_SHARES:
        return SameShares(order, substitutes)
    if not substitutes:
        return KeepsAll(order, substitutes)
    kinds: dict[Exclusion, type[Filter]] = {
        Exclusion.SHORTER_EPOCHS: ShorterEpochs,
        Exclusion.SMALLER_BATCHES: SmallerBatches,
    }
    return kinds[order.exclusion](order, substitutes)
