"""Whole samples packed into rows of a fixed length. How a row becomes a batch's tensors is in collator.py.

Best-fit decreasing (Johnson, "Fast algorithms for bin packing", 1974; for language models Ding et al., "Fewer
truncations improve language modeling", 2024): the samples, longest first, go each to the fullest row that still has
room for it. Equal lengths are placed together, as in Krell et al., "Efficient sequence packing without
cross-contamination", 2021, so that the work grows with the rows touched.

Which lengths share a row depends on the lengths alone, so every epoch has the same number of rows. Which sample of a
length goes where, and the order of rows, are drawn for each epoch from `seed + epoch`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainwright._types import DatasetLike, Item
from trainwright.data.batch_sampler import BatchedDataset, BatchOrder, fetch_items
from trainwright.data.cursor import OrderKind
from trainwright.data.length_sampler import Lengths, check_lengths, lengths_digest
from trainwright.errors import DataError

Piece = tuple[int, int, int]  # index of a sample, and the tokens of it from a start to before a stop
Row = list[Piece]
CURE = "Raise packing_length, cut the samples, or set packing_overflow='split'."


class PackedOrder(BatchOrder):
    """Batches of rows, each row a list of pieces of samples; a batch of one process has so many rows.

    A sample longer than a row is split with `splits_long`, otherwise it is a DataError, as an empty one is. `length_of`
    is the entry of a sample that has these lengths.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Lengths,
        row_length: int,
        rows_per_batch: int,
        *,
        seed: int,
        splits_long: bool = False,
        drop_last: bool = False,
        length_of: str = "input_ids",
    ) -> None:
        super().__init__()
        longest = np.iinfo(np.int64).max if splits_long else row_length
        checked = check_lengths(lengths, longest, setting="packing_length", cure=CURE)
        self.seed = seed
        self.num_samples = len(checked)
        self.unit = f"packing best_fit of {rows_per_batch} rows of {row_length}"
        self.packed_input = length_of
        self._pieces = _cut(checked, row_length)
        self._lengths = self._pieces[:, 2] - self._pieces[:, 1]
        self._row_of = best_fit_decreasing(np.sort(self._lengths)[::-1].tolist(), row_length)
        self._by_row = np.argsort(self._row_of, kind="stable")
        self._bounds = np.searchsorted(self._row_of[self._by_row], np.arange(self.num_rows + 1))
        self._rows_per_batch = rows_per_batch
        self._drop_last = drop_last
        self._splits_long = splits_long

    @property
    def num_rows(self) -> int:
        return int(self._row_of.max()) + 1 if len(self._row_of) else 0

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self._rows_per_batch)
        return full + int(rest > 0 and not self._drop_last)

    def indices(self, epoch: int) -> Iterable[list[Row]]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        drawn = torch.randperm(len(self._pieces), generator=generator).numpy()
        placed = drawn[np.argsort(-self._lengths[drawn], kind="stable")][self._by_row]
        rows = torch.randperm(self.num_rows, generator=generator).tolist()
        for batch in range(len(self)):
            chosen = rows[batch * self._rows_per_batch : (batch + 1) * self._rows_per_batch]
            yield [self._row(placed, row) for row in chosen]

    def describe(self) -> OrderKind:
        lengths = lengths_digest(self._lengths)
        return {"kind": "packing", "unit": self.unit, "splits_long": self._splits_long, "lengths": lengths}

    def _row(self, placed: NDArray[np.int64], row: int) -> Row:
        pieces = self._pieces[placed[self._bounds[row] : self._bounds[row + 1]]]
        return [(index, start, stop) for index, start, stop in pieces.tolist()]

    def num_samples_of(self, group: Sequence[Row]) -> int:
        return sum(start == 0 for row in group for _, start, _ in row)  # a sample that is cut counts with its beginning

    def num_tokens(self, epoch: int) -> int:
        widths = ([sum(stop - start for _, start, stop in row) for row in batch] for batch in self.indices(epoch))
        return sum(len(batch) * max(batch) for batch in widths)

    def wrap(self, dataset: DatasetLike) -> PackedDataset:
        return PackedDataset(dataset, self.packed_input, splits_long=self._splits_long)


class PackedDataset(BatchedDataset):
    """Gives the items of rows of pieces: for each row a list of items, cut where a piece is not the whole sample."""

    def __init__(self, dataset: DatasetLike, length_of: str, *, splits_long: bool) -> None:
        super().__init__(dataset)
        self.length_of = length_of
        self.splits_long = splits_long

    def __getitem__(self, rows: Sequence[Row]) -> list[list[Item]]:
        items = iter(fetch_items(self.dataset, [index for row in rows for index, _, _ in row]))
        return [[self._cut(next(items), piece) for piece in row] for row in rows]

    def _cut(self, item: Item, piece: Piece) -> Item:
        index, start, stop = piece
        length = len(item[self.length_of])
        if start == 0 and stop == length:
            return item
        if stop > length or not self.splits_long:
            raise DataError(
                f"Sample {index} was said to have {stop} tokens and has {length}. Mend the column of lengths "
                "(length_column_name), or leave it out: then they are counted."
            )
        return {name: value[start:stop] if _is_as_long(value, length) else value for name, value in item.items()}


def _is_as_long(value: object, length: int) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes)) and len(value) == length


def _cut(lengths: NDArray[np.int64], row_length: int) -> NDArray[np.int64]:
    """Pieces (index, start, stop) of all samples, none longer than a row."""
    counts = -(-lengths // row_length)
    index = np.repeat(np.arange(len(lengths)), counts)
    start = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * row_length
    return np.stack([index, start, np.minimum(start + row_length, lengths[index])], axis=1)


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> NDArray[np.int64]:
    """Returns the row of each sample, of which the longest comes first; a row takes so many tokens."""
    row_of = np.zeros(len(lengths), dtype=np.int64)
    room: dict[int, list[int]] = {}  # free tokens -> rows with so many
    rooms: list[int] = []  # its keys, sorted
    num_rows = position = 0
    while position < len(lengths):
        length = lengths[position]
        fit = bisect_left(rooms, length)
        if fit == len(rooms):
            free, row, num_rows = capacity, num_rows, num_rows + 1
        else:
            free = rooms[fit]
            row = room[free].pop()
            if not room[free]:
                del room[free], rooms[fit]
        # The next sample of this length fits this row best again, until it is too full for it.
        end = position + free // length
        while position < min(end, len(lengths)) and lengths[position] == length:
            row_of[position] = row
            position, free = position + 1, free - length
        if free:
            if free not in room:
                insort(rooms, free)
            room.setdefault(free, []).append(row)
    return row_of
