"""Filters: how an order changes without excluded samples. Each kind of order has its own kind of filter.

- `ShorterEpochs`, if each sample is drawn once: excluded samples are skipped, and the epoch becomes shorter.
- `SmallerBatches`, for the order of a sampler or of groups: batches lose samples; their number does not change.
- `SameShares`, if sources have shares: another sample of the same source takes the place.

A position in an epoch always counts the samples of the whole order, including skipped ones.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from trainwright.data.order import Exclusion, Order
from trainwright.data.shards import ChunkPart, RankShare

# Any: an index into the user's dataset, or a group of indices.


class Filter(ABC):
    """An order without the excluded samples.

    Args:
        order: the order of all samples.
        substitutes: the replacement for each excluded sample.
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
        """Number of samples by which an epoch is shorter."""
        return 0

    @property
    def loses_samples(self) -> bool:
        """True if batches become smaller while their number stays the same."""
        return False

    def indices(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Returns the indices of an epoch that go into batches."""
        return indices

    def excluding(self, substitutes: Mapping[int, int]) -> Filter:
        """Returns a filter of the same order for other samples; the current epoch keeps this filter."""
        return make_filter(self.order, substitutes)

    @abstractmethod
    def batches(
        self, chunks: Iterator[list[Any]], share: RankShare, *, epoch: int, parts: dict[int, ChunkPart]
    ) -> Iterator[list[Any]]:
        """Returns this process's batches of an epoch's chunks; `parts` gets the uneven ones, numbered from 1."""

    def num_kept(self, epoch: int, before: int) -> int:
        """Returns the number of samples before a position of an epoch that are not skipped."""
        return before

    def place_after(self, epoch: int, num_kept: int) -> int:
        """Returns the position in an epoch after `num_kept` samples that are not skipped."""
        return num_kept


class KeepsAll(Filter):
    """No sample is excluded."""

    def batches(
        self, chunks: Iterator[list[Any]], share: RankShare, *, epoch: int, parts: dict[int, ChunkPart]
    ) -> Iterator[list[Any]]:
        return share.batches(chunks)


class ShorterEpochs(Filter):
    """Skips excluded samples. The positions to skip in an epoch are computed once, when first needed."""

    def __init__(self, order: Order, substitutes: Mapping[int, int]) -> None:
        super().__init__(order, substitutes)
        self._epoch = -1  # the epoch of `_places`
        self._places: Sequence[int] = ()  # positions to skip, in order

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
    """Replaces an excluded sample by the next sample of the same source; a group loses it.

    No sample moves to another batch, so a change takes effect at once, even within an epoch.
    """

    def excluding(self, substitutes: Mapping[int, int]) -> Filter:
        self.substitutes = substitutes
        return self

    def batches(
        self, chunks: Iterator[list[Any]], share: RankShare, *, epoch: int, parts: dict[int, ChunkPart]
    ) -> Iterator[list[Any]]:
        for batch in share.batches(chunks):
            yield [substitute_index(index, self, epoch) for index in batch] if self.substitutes else batch


class SmallerBatches(Filter):
    """Removes excluded samples from batches; the rest of a chunk is divided among the processes like a tail."""

    @property
    def loses_samples(self) -> bool:
        return True

    def batches(
        self, chunks: Iterator[list[Any]], share: RankShare, *, epoch: int, parts: dict[int, ChunkPart]
    ) -> Iterator[list[Any]]:
        for number, chunk in enumerate(chunks, start=1):
            kept = without(chunk, self.excluded)
            part = share.part(len(kept)) if kept else STANDS_IN
            if not kept:  # a filler batch, so that the number of batches stays the same
                kept = [substitute_index(chunk[0], self, epoch)]
            is_tail = len(kept) < share.chunk_size and not share.even
            if part.num_samples == 0 or len(kept) % share.num_processes or is_tail:
                parts[number] = part
            yield kept[part.start : part.stop]


STANDS_IN = ChunkPart(start=0, stop=1, num_samples=0, weight=0.0)


def substitute_index(index: Any, kept: Filter, epoch: int) -> Any:
    """Returns the replacement for an index; a group that would become empty is replaced by another of its epoch."""
    if not isinstance(index, list):
        return kept.substitutes.get(index, index)
    groups = itertools.chain([index], kept.order.indices(epoch))
    return next(rest for group in groups if (rest := without(group, kept.excluded)))


def make_filter(order: Order, substitutes: Mapping[int, int]) -> Filter:
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


def without(group: list[Any], excluded: Collection[int]) -> list[Any]:
    """Returns a batch formed by length (indices, or rows of pieces of samples) without its excluded samples."""
    if group and isinstance(group[0], list):
        return [row for one in group if (row := without(one, excluded))]
    return [one for one in group if (one[0] if isinstance(one, tuple) else one) not in excluded]
