"""Batches formed by length from a stream: a bounded look-ahead is read, and batches are taken from it.

A look-ahead is the next samples of the stream: at least `size` of them, and enough for `min_batches` batches and one
batch for each process. The longest prefix that forms a whole number of batches for every process is used; the rest
becomes the beginning of the next look-ahead. So no batch is half empty and no process waits until the stream ends: the
remainder is then distributed like any tail. Which samples a look-ahead takes depends on its start, on the samples'
lengths and on the number of processes; given its start and its number of batches, it can be formed again.

Items are read in blocks that begin at multiples of `block`, so that random draws during a block, and the state after
it, do not depend on where a resume began to read.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trainwright._types import Item, SampleIds
from trainwright.config.plans import SamplingPlan
from trainwright.data.batcher import Batcher, find_batcher
from trainwright.data.cursor import OrderKind
from trainwright.data.length_sampler import BatchOrder
from trainwright.data.shards import ChunkPart
from trainwright.data.streaming.kept_items import KeptItems
from trainwright.errors import DataError

State = object  # the user's dataset returns it from `state_dict`


@dataclass(frozen=True, slots=True)
class BatchFormer:
    """Forms batches from the samples of a look-ahead into a stream."""

    plan: SamplingPlan
    size: int = 1024  # samples per look-ahead, at least
    min_batches: int = 16  # batches per look-ahead, at least
    block: int = 64  # items read at once
    batcher: Batcher = field(init=False)

    def __post_init__(self) -> None:
        batcher = find_batcher(self.plan)
        assert batcher is not None, "the plan forms no batches by length"
        object.__setattr__(self, "batcher", batcher)

    @property
    def unit(self) -> str:
        """The settings that define a batch."""
        return f"{self.batcher.make_order([1], seed=0, drop_last=False).unit} from look-aheads of {self.size}"

    def describe(self) -> OrderKind:
        """Returns everything that the batches depend on besides the stream, the seed and the number of processes."""
        return {
            "unit": self.unit,
            "min_batches": self.min_batches,
            "block": self.block,
            "pad_to": self.plan.pad_to,
            "splits_long": self.batcher.splits_long,
            "length_of": self.plan.length_of,
        }

    def order(self, lengths: Sequence[int], *, seed: int = 0, drop_last: bool = False) -> BatchOrder:
        """Returns the batches of samples with these lengths.

        `drop_last` drops an incomplete batch of the last look-ahead.
        """
        return self.batcher.make_order(lengths, seed=seed, drop_last=drop_last and self.plan.drop_last)

    def length(self, item: Item, number: int) -> int:
        """Counts the tokens of an item of the stream, which has no column of lengths.

        DataError for none or too many.
        """
        name = self.plan.length_of
        batcher = self.batcher
        if not isinstance(item, Mapping) or name not in item:
            has = ", ".join(sorted(item)) if isinstance(item, Mapping) else f"a {type(item).__name__}"
            raise DataError(
                f"Batches are formed by the length of {name!r}, but item {number} of the stream has {has}. Give the "
                "items that entry (tokenize the stream with map), or pass a processing_class with a matching first "
                "input."
            )
        length = len(item[name])
        if length < 1:
            raise DataError(f"Item {number} of the stream has no tokens. Remove such samples.")
        if length > batcher.limit and not batcher.splits_long:
            what = f"more than {batcher.setting}={batcher.limit}. {batcher.cure}"
            raise DataError(f"Item {number} of the stream has {length} tokens, {what}")
        return length


class LookaheadBuffer:
    """Items of a stream from position `at` on, and the last earlier position from which they can be read again.

    `begin_block` is called with the number of each block before it is read, and returns the dataset's state there.
    """

    def __init__(
        self, items: KeptItems, begin_block: Callable[[int], State], *, block: int, at: int, state: State
    ) -> None:
        self.items: list[Item] = []
        self.numbers: list[int] = []  # numbers of the items, if they have any
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
    def mark(self) -> tuple[int, State]:
        """Returns the last marked position at or before the start, and the dataset's state there."""
        return self._marks[0]

    def fill(self, size: int) -> bool:
        """Reads until it holds `size` items; returns False if the stream has fewer."""
        while len(self.items) < size and not self._has_ended:
            at = self.start + len(self.items)
            state = self._begin_block(at // self._block)
            if at != self._opened and state is not None:
                self._marks.append((at, state))
            more: list[Item] = []
            more += itertools.islice(self._source, self._block - at % self._block)  # kept after an error
            self.items += more
            self.numbers += self._source.numbers_given()
            self._has_ended = not more
        return len(self.items) >= size

    def drop(self, size: int) -> None:
        """Removes the first items, which are in batches."""
        del self.items[:size], self.numbers[:size]
        self.start += size
        while len(self._marks) > 1 and self._marks[1][0] <= self.start:
            del self._marks[0]


class LookaheadBatches:
    """The batches of one look-ahead, in order. Samples are looked up when a batch is asked for."""

    def __init__(self, items: list[Item], numbers: list[int], order: BatchOrder) -> None:
        self._dataset = order.wrap(items)
        self._numbers = numbers
        self._order = order
        self.groups = list(order.indices(0))

    def batches_from(self, first: int) -> Callable[[ChunkPart | None], list[Item]]:
        """Returns a function from a process's part to its batch, among as many batches as there are processes."""

        def batch(part: ChunkPart | None) -> list[Item]:
            return self._dataset[self.groups[first + (0 if part is None else part.start)]]

        return batch

    def samples_from(self, first: int) -> Callable[[ChunkPart | None], SampleIds]:
        """Returns the ids of `batches_from`: of samples, or of their pieces by row; empty if unknown."""
        numbers = self._numbers

        def samples(part: ChunkPart | None) -> SampleIds:
            if not numbers:
                return []
            group = self.groups[first + (0 if part is None else part.start)]
            if isinstance(group[0], list):
                return [[(numbers[place], start, stop) for place, start, stop in row] for row in group]
            return [numbers[place] for place in group]

        return samples

    def num_samples(self, start: int, stop: int) -> int:
        """Returns the number of samples in some of the batches."""
        return sum(self._order.count_samples(group) for group in self.groups[start:stop])


def next_lookahead(
    buffer: LookaheadBuffer, batcher: BatchFormer, *, multiple: int, seed: int
) -> tuple[LookaheadBatches, int] | None:
    """Returns the batches of the next look-ahead and the number of samples in them; None at the end of the stream.

    Their number is a multiple of `multiple`, unless the stream ends; `seed` determines their order.
    """
    lengths: list[int] = []
    num = batcher.size
    has_all = False
    count = 0
    while not has_all and count <= max(multiple, batcher.min_batches):
        has_all = not buffer.fill(num)
        new = buffer.items[len(lengths) : num]
        lengths += [batcher.length(item, buffer.start + len(lengths) + i) for i, item in enumerate(new)]
        count = len(batcher.order(lengths)) if lengths and not has_all else 0
        num += -(-num // 2)
    if not lengths:
        return None
    size = len(lengths)
    if not has_all:  # as many samples, from the front, as fill a whole number of batches
        most = (count - 1) // multiple * multiple
        size = bisect_right(range(1, size), most, key=lambda size: len(batcher.order(lengths[:size])))
    order = batcher.order(lengths[:size], seed=seed, drop_last=has_all)
    return LookaheadBatches(buffer.items[:size], buffer.numbers[:size], order), size
