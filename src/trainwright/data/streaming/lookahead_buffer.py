"""Batches formed by length from a stream: a bounded look-ahead is read, and batches are taken out of it.

A look-ahead is the next samples of the stream: at least `size` of them, and enough for `min_batches` batches and one
batch for each process. Of these as many are taken, from the front, as make a whole number of batches for every
process; the rest goes first into the next look-ahead. So no batch is half empty and no process waits, until the stream
ends: what is left then is shared like any tail. Which samples a look-ahead takes depends on where it starts, on the
samples' lengths and on the number of processes; with its start and its number of batches it can be formed again.

Items are read in blocks that begin at multiples of `block`, so that what is drawn while a block is read, and the state
behind it, do not depend on where a resume began to read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from trainwright.data.batch_sampler import BatchOrder
from trainwright.data.sharding import ChunkPart
from trainwright.data.streaming.batching import BatchFormer


class LookaheadBuffer:
    """Items of a stream from a position on, and the last place before it from which they can be read again.

    Args:
        items: of the stream.
        block: items that are read at once.
        at: items of the stream before the first of these.
        state: the dataset's state there, if it has one.
        begin_block: called with its number before a block is read; returns the dataset's state there.
    """

    def __init__(
        self, items: Iterator[Any], begin_block: Callable[[int], Any], *, block: int, at: int, state: Any
    ) -> None:
        self.items: list[Any] = []
        self.start = at
        self._source = items
        self._begin_block = begin_block
        self._block = block
        self._opened = at
        self._has_ended = False
        self._marks = [(at, state)]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def mark(self) -> tuple[int, Any]:
        """Items before a place in the stream that is not behind the start, and the dataset's state there."""
        return self._marks[0]

    def fill(self, size: int) -> bool:
        """Whether the stream has so many items from the start on."""
        while len(self.items) < size and not self._has_ended:
            at = self.start + len(self.items)
            state = self._begin_block(at // self._block)
            if at != self._opened and state is not None:
                self._marks.append((at, state))
            more = list(itertools.islice(self._source, self._block - at % self._block))
            self.items += more
            self._has_ended = not more
        return len(self.items) >= size

    def drop(self, size: int) -> None:
        """The first items are done with."""
        del self.items[:size]
        self.start += size
        while len(self._marks) > 1 and self._marks[1][0] <= self.start:
            del self._marks[0]


class LookaheadBatches:
    """The batches of one look-ahead, in order. Samples are looked up when a batch is asked for."""

    def __init__(self, items: list[Any], order: BatchOrder) -> None:
        self._dataset: Any = order.wrap(items)
        self._order = order
        self.groups = list(order.indices(0))

    def batches_from(self, first: int) -> Callable[[ChunkPart | None], list[Any]]:
        """Of as many as there are processes, one for each, the batch of the process with a part."""

        def batch(part: ChunkPart | None) -> list[Any]:
            items: list[Any] = self._dataset[self.groups[first + (0 if part is None else part.start)]]
            return items

        return batch

    def num_samples(self, start: int, stop: int) -> int:
        return sum(self._order.num_samples_of(group) for group in self.groups[start:stop])


def next_lookahead(
    buffer: LookaheadBuffer, former: BatchFormer, *, multiple: int, seed: int
) -> tuple[LookaheadBatches, int] | None:
    """The batches of the next look-ahead and how many samples they take; None when the stream has ended.

    `multiple`: of so many batches their number is one, unless the stream ends.
    """
    lengths: list[int] = []
    num, has_all = former.size, False
    count = 0
    while not has_all and count <= max(multiple, former.min_batches):
        has_all = not buffer.fill(num)
        new = buffer.items[len(lengths) : num]
        lengths += [former.length(item, buffer.start + len(lengths) + i) for i, item in enumerate(new)]
        count = len(former.order(lengths)) if lengths and not has_all else 0
        num += -(-num // 2)
    if not lengths:
        return None
    size = len(lengths) if has_all else _largest(lengths, former, (count - 1) // multiple * multiple)
    order = former.order(lengths[:size], seed=seed, drop_last=has_all)
    return LookaheadBatches(buffer.items[:size], order), size


def _largest(lengths: list[int], former: BatchFormer, num_batches: int) -> int:
    """Of how many samples, from the front, so many batches can be formed, the last one full."""
    fits, too_many = 0, len(lengths)
    while too_many - fits > 1:
        size = (fits + too_many) // 2
        if len(former.order(lengths[:size])) <= num_batches:
            fits = size
        else:
            too_many = size
    return fits
