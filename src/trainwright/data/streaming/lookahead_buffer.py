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
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainwright._types import Item, SampleIds
from trainwright.config.plans import SamplingPlan
from trainwright.data.cursor import OrderKind
from trainwright.data.length_sampler import BatchOrder, Lengths, TokenBudget
from trainwright.data.packing import CURE, PackedOrder
from trainwright.data.quarantine import KeptItems
from trainwright.data.shards import ChunkPart
from trainwright.errors import DataError

State = object  # of the user's dataset, as its `state_dict` returns it


def formed_by_length(
    lengths: Sequence[int] | Lengths, plan: SamplingPlan, *, seed: int, drop_last: bool
) -> TokenBudget | PackedOrder:
    """Batches of samples with these lengths, as the plan forms them; DataError for an empty or too long sample."""
    if plan.max_tokens is not None:
        return TokenBudget(lengths, plan.max_tokens, seed=seed, multiple_of=plan.pad_to)
    assert plan.row_length is not None
    return PackedOrder(
        lengths,
        plan.row_length,
        plan.batch_size,
        seed=seed,
        splits_long=plan.splits_long,
        drop_last=drop_last,
        length_of=plan.length_of,
    )


@dataclass(frozen=True, slots=True)
class BatchFormer:
    """Forms batches of the samples of a look-ahead into a stream."""

    plan: SamplingPlan
    size: int = 1024  # samples of a look-ahead, at least
    min_batches: int = 16  # batches that can be formed of it, at least
    block: int = 64  # items that are read at once

    @property
    def packed_input(self) -> str | None:
        """The entry whose tokens are packed into rows; None where samples stay rows of their own."""
        return self.plan.length_of if self.plan.row_length is not None else None

    @property
    def unit(self) -> str:
        """The settings that decide what a batch is."""
        return f"{formed_by_length([1], self.plan, seed=0, drop_last=False).unit} from look-aheads of {self.size}"

    def describe(self) -> OrderKind:
        """Everything that the batches depend on besides the stream, the seed and the number of processes."""
        of_plan = {name: getattr(self.plan, name) for name in ("pad_to", "splits_long", "length_of")}
        return {"unit": self.unit, "min_batches": self.min_batches, "block": self.block, **of_plan}

    def order(self, lengths: Sequence[int], *, seed: int = 0, drop_last: bool = False) -> BatchOrder:
        """The batches of samples with these lengths; `drop_last` leaves out one of the last look-ahead if not full."""
        return formed_by_length(lengths, self.plan, seed=seed, drop_last=drop_last and self.plan.drop_last)

    def length(self, item: Item, number: int) -> int:
        """Tokens of an item of the stream, counted, since no column can be asked; DataError for none or too many."""
        name = self.plan.length_of
        plan = self.plan
        if not isinstance(item, Mapping) or name not in item:
            has = ", ".join(sorted(item)) if isinstance(item, Mapping) else f"a {type(item).__name__}"
            raise DataError(
                f"Batches are formed by the length of {name!r}, and item {number} of the stream has {has}. Give the "
                "items that entry (tokenize the stream by map), or pass a processing_class whose first input they have."
            )
        length = len(item[name])
        setting = "packing_length"
        limit = plan.row_length
        cure = CURE
        if plan.max_tokens is not None:
            setting = "max_tokens_per_batch"
            limit = plan.max_tokens
            cure = "Raise the budget, or cut the samples."
        if length < 1 or (length > (limit or length) and not plan.splits_long):
            what = f"more than {setting}={limit}. {cure}" if length else "none. Leave such samples out."
            raise DataError(f"Item {number} of the stream has {length} tokens, {what}")
        return length


class LookaheadBuffer:
    """Items of a stream from position `at` on, and the last place before it from which they can be read again.

    `begin_block` is called with its number before each `block` of items is read, and returns the dataset's state there.
    """

    def __init__(
        self, items: KeptItems, begin_block: Callable[[int], State], *, block: int, at: int, state: State
    ) -> None:
        self.items: list[Item] = []
        self.numbers: list[int] = []  # of the items, where they have any
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
        """Items before a place in the stream that is not behind the start, and the dataset's state there."""
        return self._marks[0]

    def fill(self, size: int) -> bool:
        """Reads until there are so many items; returns False where the stream has fewer."""
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
        """Removes the first items: they are in batches."""
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
        """The batch of a process with a part, of as many batches as there are processes."""

        def batch(part: ChunkPart | None) -> list[Item]:
            return self._dataset[self.groups[first + (0 if part is None else part.start)]]

        return batch

    def samples_from(self, first: int) -> Callable[[ChunkPart | None], SampleIds]:
        """Returns the ids of what `batches_from` gives: of samples, or of their pieces by row; empty if unknown."""
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
        """Samples in some of the batches."""
        return sum(self._order.num_samples_of(group) for group in self.groups[start:stop])


def next_lookahead(
    buffer: LookaheadBuffer, former: BatchFormer, *, multiple: int, seed: int
) -> tuple[LookaheadBatches, int] | None:
    """The batches of the next look-ahead and how many samples they take; None when the stream has ended.

    Their number is a multiple of `multiple`, unless the stream ends; their order is drawn from `seed`.
    """
    lengths: list[int] = []
    num = former.size
    has_all = False
    count = 0
    while not has_all and count <= max(multiple, former.min_batches):
        has_all = not buffer.fill(num)
        new = buffer.items[len(lengths) : num]
        lengths += [former.length(item, buffer.start + len(lengths) + i) for i, item in enumerate(new)]
        count = len(former.order(lengths)) if lengths and not has_all else 0
        num += -(-num // 2)
    if not lengths:
        return None
    size = len(lengths)
    if not has_all:  # as many samples, from the front, as fill a number of batches, the last one too
        most = (count - 1) // multiple * multiple
        size = bisect_right(range(1, size), most, key=lambda size: len(former.order(lengths[:size])))
    order = former.order(lengths[:size], seed=seed, drop_last=has_all)
    return LookaheadBatches(buffer.items[:size], buffer.numbers[:size], order), size
