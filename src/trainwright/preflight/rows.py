"""Rows of a dataset for the checks: which of them are examined, and how they are read without a trace.

Before a run, only data that runs no user code is read: lists, a `datasets.Dataset` without a transform, and mixtures
and subsets of these. A dataset with its own `__getitem__` may draw random numbers, keep state or take seconds, so only
`trainer.check()` reads it. A stream is never read here.
"""

from __future__ import annotations

import random
import reprlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from trainwright._types import DatasetLike, counted, has_length
from trainwright.data.columns import is_columnar
from trainwright.data.row_names import RowNames, row_names
from trainwright.data.sources import IndexedSources
from trainwright.errors import DataError

# Any: cells of a row are the user's own types.

MOST_SHOWN = 3  # rows that a finding shows
MOST_CHARACTERS = 60  # length of a text in a finding
PLAIN = ("Value", "ClassLabel")  # features of the package datasets with cells that need no decoding
BLOCK = 64  # rows used to estimate the size of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of the examination.

    Attributes:
        rows: maximum number of rows.
        size_bytes: maximum size of the columns of a `datasets.Dataset`.
        seconds: maximum time to read rows of a dataset of the user's own class; None: it is not read.
    """

    rows: int
    size_bytes: int
    seconds: float | None = None


class Cells(Protocol):
    """Rows that were read, by position from 0."""

    names: tuple[str, ...]

    def __len__(self) -> int: ...

    def sizes(self, name: str) -> Sequence[Hashable]:
        """Returns the length of each cell of a column, or its shape; None if it has neither."""

    def outside(self, name: str, limit: int) -> list[tuple[int, int]]:
        """Returns position and value of labels below 0 or not below the limit, one per row; -100 is not a label."""

    def keys(self, name: str) -> Sequence[Hashable]:
        """Returns for each cell of a column a quickly computed key that equal cells share."""

    def column(self, name: str) -> list[Any]:
        """Returns the cells of a column."""

    def item(self, place: int) -> Mapping[str, Any]:
        """Returns a row."""


class Items:
    """Rows in Python's own types."""

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        self._items = items
        self.names = tuple(items[0]) if items else ()

    def __len__(self) -> int:
        return len(self._items)

    def sizes(self, name: str) -> list[Hashable]:
        cells = self.column(name)
        return [len(cell) if type(cell) is list else _size(cell) for cell in cells]

    def column(self, name: str) -> list[Any]:
        return [item.get(name) for item in self._items]

    def outside(self, name: str, limit: int) -> list[tuple[int, int]]:
        found = []
        for place, cell in enumerate(self.column(name)):
            if type(cell) is int and 0 <= cell < limit:
                continue
            wrong = _outside(cell, limit)
            if wrong is not None:
                found.append((place, wrong))
        return found

    def keys(self, name: str) -> list[Hashable]:
        return [cell if type(cell) is str else _key(cell) for cell in self.column(name)]

    def item(self, place: int) -> Mapping[str, Any]:
        return self._items[place]


class ArrowCells:
    """Rows of a `datasets.Dataset`, as a pyarrow table: only cells shown in a finding are converted."""

    def __init__(self, table: Any) -> None:
        self._table = table.combine_chunks()
        self.names = tuple(table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _lists(self, name: str) -> tuple[Any, Any, Any]:
        """Returns the lengths of the lists in a column, their start positions, and their values concatenated."""
        import pyarrow.compute as pc

        column = self._table.column(name)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = pc.list_flatten(column).to_numpy(zero_copy_only=False)
        return lengths, np.cumsum(lengths) - lengths, values

    def _has_lists(self, name: str) -> bool:
        from pyarrow import types

        kind = self._table.schema.field(name).type
        return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))

    def _has_integers(self, name: str) -> bool:
        from pyarrow import types

        kind = self._table.schema.field(name).type
        return bool(types.is_integer(kind.value_type if self._has_lists(name) else kind))

    def sizes(self, name: str) -> Sequence[Hashable]:
        if not self._has_lists(name):
            return [None] * len(self)
        lengths: list[Hashable] = self._lists(name)[0].tolist()
        return lengths

    def outside(self, name: str, limit: int) -> list[tuple[int, int]]:
        if not self._has_integers(name):
            return []
        if self._has_lists(name):
            lengths, _, values = self._lists(name)
            rows = np.repeat(np.arange(len(lengths)), lengths)
        else:
            column = self._table.column(name)
            rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
            values = column.drop_null().to_numpy()
        wrong = np.flatnonzero(((values < 0) & (values != -100)) | (values >= limit))
        _, first = np.unique(rows[wrong], return_index=True)
        return [(int(rows[at]), int(values[at])) for at in wrong[first]]

    def column(self, name: str) -> list[Any]:
        cells: list[Any] = self._table.column(name).to_pylist()
        return cells

    def keys(self, name: str) -> Sequence[Hashable]:
        if not self._has_lists(name):
            return self.column(name)
        lengths, starts, values = self._lists(name)
        has_some = lengths > 0
        parts = [lengths.tolist()]
        for at in (starts, starts + lengths // 2, starts + lengths - 1):
            part = np.zeros(len(lengths), dtype=values.dtype)
            part[has_some] = values[at[has_some]]
            parts.append(part.tolist())
        return list(zip(*parts, strict=True))

    def item(self, place: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table.slice(place, 1).to_pylist()[0]
        return row


def _size(cell: Any) -> Hashable:
    if isinstance(cell, (list, tuple)):
        return len(cell)
    shape = tuple(getattr(cell, "shape", ()))
    if len(shape) == 1:  # like a list, with which an array can be stacked
        return int(shape[0])
    return shape or None


def _outside(label: Any, limit: int) -> int | None:
    """Returns the first integer that is not a class; None if there is none, or the values are not integers."""
    if isinstance(label, (torch.Tensor, np.ndarray, np.generic)):
        label = label.tolist()
    if not isinstance(label, list):
        label = [label]
    if not label or not isinstance(label[0], int) or isinstance(label[0], bool):
        return None
    wrong = (one for one in label if not 0 <= one < limit and one != -100)
    return next(wrong, None)


def _key(cell: Any) -> Hashable:
    """Returns a key that equal cells share, in whatever form they are: for a list, its length and three elements."""
    if isinstance(cell, (list, tuple)):
        num = len(cell)
        return (num, _key(cell[0]), _key(cell[num // 2]), _key(cell[-1])) if num else (0, 0, 0, 0)
    if isinstance(cell, Mapping):
        return tuple([_key(value) for value in cell.values()])
    if isinstance(cell, (torch.Tensor, np.ndarray)) and cell.ndim > 1:
        return tuple(cell.shape), float(cell.sum())
    if isinstance(cell, (torch.Tensor, np.ndarray)) and cell.ndim == 1:
        num = len(cell)
        return (num, *cell[[0, num // 2, num - 1]].tolist()) if num else (0, 0, 0, 0)
    if isinstance(cell, (torch.Tensor, np.ndarray, np.generic)):
        cell = cell.item()
    return cell if isinstance(cell, (int, float, str)) else type(cell).__name__


class Rows:
    """Rows of one dataset that are examined.

    Attributes:
        names: entries of a row.
        numbers: by position, the number of the row used by the trainer.
        num_rows: number of rows of the dataset.
        batches: row numbers of each batch of this process, in order; None if the order is unknown.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Sequence[int], Cells]],
        *,
        num_rows: int,
        find_name: Callable[[int], str],
        batches: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._parts = [cells for _, cells in parts]
        self.numbers = [number for numbers, _ in parts for number in numbers]
        self.names = tuple(dict.fromkeys(name for cells in self._parts for name in cells.names))
        self.num_rows = num_rows
        self.batches = batches
        self._name_of = find_name

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def what(self) -> str:
        """Says how many rows were examined, unless it was all of them; ends with a blank."""
        return "" if len(self) == self.num_rows else f"Of {len(self)} of {counted(self.num_rows, 'row')} examined: "

    def sizes(self, name: str) -> list[Hashable]:
        return self._joined(name, lambda cells: cells.sizes(name))

    def _joined(self, name: str, read: Callable[[Cells], Sequence[Any]]) -> list[Any]:
        """Returns the values read from a column of each part; None for the rows of a part without the column."""
        return [
            value for cells in self._parts for value in (read(cells) if name in cells.names else [None] * len(cells))
        ]

    def outside(self, name: str, limit: int) -> list[tuple[int, int]]:
        found = []
        start = 0
        for cells in self._parts:
            if name in cells.names:
                found += [(start + place, value) for place, value in cells.outside(name, limit)]
            start += len(cells)
        return found

    def keys(self, name: str) -> list[Hashable]:
        return self._joined(name, lambda cells: cells.keys(name))

    def column(self, name: str) -> list[Any]:
        return self._joined(name, lambda cells: cells.column(name))

    def item(self, place: int) -> Mapping[str, Any]:
        for cells in self._parts:
            if place < len(cells):
                return cells.item(place)
            place -= len(cells)
        raise IndexError(place)

    def find_name(self, place: int) -> str:
        """Returns the name of the row at a position."""
        return self._name_of(self.numbers[place])


# -- reading -----------------------------------------------------------------------------------------------------------


def fetch_rows(
    dataset: DatasetLike,
    budget: Budget,
    *,
    find_name: Callable[[int], str],
    batches: Iterator[Sequence[int]] | None = None,
    only_batches: bool = False,
) -> Rows | None:
    """Reads rows of a dataset within a budget; None if it cannot be read without a trace, or has no named entries.

    Args:
        dataset: any dataset.
        budget: limits on rows and bytes.
        find_name: returns the name of a row.
        batches: row numbers of the batches in the order of training; None if unknown.
        only_batches: read only the rows of the batches, if they are known; otherwise all rows, or a sample.
    """
    if isinstance(dataset, IterableDataset) or not has_length(dataset) or len(dataset) == 0:
        return None
    num_rows = len(dataset)
    known = None if batches is None else list(_within(batches, budget.rows))
    if known is not None and only_batches:
        numbers = list(dict.fromkeys(number for batch in known for number in batch))
    elif num_rows <= budget.rows:
        numbers = list(range(num_rows))
    else:
        numbers = random.Random(0).sample(range(num_rows), k=budget.rows)
    parts = _parts(dataset, numbers, budget)
    if not parts:
        return None
    if known is not None:
        read = {number for of_part, _ in parts for number in of_part}
        known = [batch for batch in known if read.issuperset(batch)]
    return Rows(parts, num_rows=num_rows, find_name=find_name, batches=known)


def _within(batches: Iterator[Sequence[int]], most: int) -> Iterator[Sequence[int]]:
    """Yields batches with at most `most` rows in total."""
    num = 0
    for batch in batches:
        num += len(batch)
        if num > most:
            return
        yield batch


def _parts(dataset: DatasetLike, numbers: list[int], budget: Budget) -> list[tuple[Sequence[int], Cells]] | None:
    if isinstance(dataset, IndexedSources):
        return _parts_by_source(dataset, numbers, budget)
    if type(dataset) is Subset:
        return _renumbered(_parts(dataset.dataset, [int(dataset.indices[n]) for n in numbers], budget), numbers)
    cells: Cells | None = None
    if getattr(type(dataset), "__getitem__", None) in (list.__getitem__, tuple.__getitem__):
        cells = _read_items([dataset[number] for number in numbers])
    elif is_columnar(dataset):
        if dataset.format["type"] != "custom":
            cells = _read_columns(dataset, numbers, budget)
    elif budget.seconds is not None:
        cells = _read_items(list(_read(dataset, numbers, budget.seconds)))
    return None if cells is None else [(numbers[: len(cells)], cells)]


def _renumbered(
    parts: list[tuple[Sequence[int], Cells]] | None, numbers: Sequence[int]
) -> list[tuple[Sequence[int], Cells]] | None:
    """Returns parts renumbered for the enclosing dataset; parts may end early, and keep the order."""
    if parts is None or len(parts) != 1:
        return None
    return [(numbers[: len(parts[0][1])], parts[0][1])]


def _parts_by_source(
    dataset: IndexedSources, numbers: Sequence[int], budget: Budget
) -> list[tuple[Sequence[int], Cells]] | None:
    of_source: dict[str, list[int]] = {}
    rows: dict[str, list[int]] = {}
    for number in numbers:
        name, row = dataset.find_source(number)
        of_source.setdefault(name, []).append(number)
        rows.setdefault(name, []).append(row)
    found: list[tuple[Sequence[int], Cells]] = []
    for name, of_this in of_source.items():
        found += _renumbered(_parts(dataset.sources[name], rows[name], budget), of_this) or ()
    return found or None


def _read_items(items: list[Any]) -> Items | None:
    return Items(items) if items and all(isinstance(item, Mapping) for item in items) else None


def _read_columns(dataset: Any, numbers: list[int], budget: Budget) -> ArrowCells | None:
    names = [name for name, feature in dataset.features.items() if _is_plain(feature)]
    if not names:
        return None
    table = dataset.select_columns(names).with_format("arrow")
    first = table[numbers[:BLOCK]]
    most = max(int(budget.size_bytes / max(first.nbytes / len(first), 1)), BLOCK)
    return ArrowCells(first if len(numbers) <= BLOCK else table[numbers[:most]])


def _is_plain(feature: Any) -> bool:
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return type(feature).__name__ in ("List", "LargeList", "Sequence") and type(inner).__name__ in PLAIN
    return type(feature).__name__ in PLAIN and getattr(feature, "dtype", "") not in ("binary", "large_binary")


def _read(dataset: Any, numbers: Iterable[int], seconds: float) -> Iterator[Any]:
    """Yields rows until the time is up; stops at a row that cannot be read, which training will report."""
    end = time.monotonic() + seconds
    for number in numbers:
        try:
            yield dataset[number]
        except Exception:
            return
        if time.monotonic() > end:
            return


def iterate_batches(dataloader: Any, num_batches: int) -> Iterator[list[int]] | None:
    """Yields the rows of the first batches of the first epoch; None if their order cannot be computed."""
    from trainwright.data.batches import EpochBatches

    batches = getattr(dataloader, "batch_sampler", None)
    if not isinstance(batches, EpochBatches) or not batches.order_epoch(0).is_computable:
        return None
    found = (_flat(batch) for batch in batches.computed(0, 0))
    return islice(found, num_batches)


def _flat(batch: Sequence[Any]) -> list[int]:
    """Returns the indices of a batch; a group of indices that forms a batch is flattened."""
    return [index for one in batch for index in (one if isinstance(one, (list, tuple)) else [one])]


# -- showing -----------------------------------------------------------------------------------------------------------

_texts = reprlib.Repr()
_texts.maxstring = MOST_CHARACTERS
_texts.maxlist = 8


def quoted(cell: object) -> str:
    """Returns a cell as Python code, so that blanks and odd characters are visible, shortened in the middle."""
    return _texts.repr(cell)


def quote_sample(item: Mapping[str, Any], processing_class: Any) -> str:
    """Returns the text of a row, quoted: its longest one, decoded from its tokens, or else its first entry.

    The longest one, since an id or a label may come first.
    """
    text = max((cell for cell in item.values() if isinstance(cell, str)), key=len, default=None)
    ids = item.get("input_ids")
    if text is None and ids is not None and hasattr(processing_class, "decode"):
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        half = MOST_CHARACTERS // 2  # a token is at least one character
        try:
            shown = ids if len(ids) <= MOST_CHARACTERS else [*ids[:half], *ids[-half:]]
            text = str(processing_class.decode(shown, skip_special_tokens=True))
        except Exception:  # ids unknown to the tokenizer
            text = None
    if text is not None:
        return quoted(text)
    entry = next(iter(item.values()), None)
    return quoted(entry.tolist() if isinstance(entry, torch.Tensor) else entry)


def shown_rows(rows: Rows, places: Sequence[int], processing_class: Any, *, most: int = MOST_SHOWN) -> str:
    """Names rows, each with a sample of its text: `train[17] 'some text', train[30] 'other' and 10 more`."""
    parts = [f"{rows.find_name(place)} {quote_sample(rows.item(place), processing_class)}" for place in places[:most]]
    more = f" and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(parts) + more


def names_by(dataset: DatasetLike, source: str, id_column: str | None) -> Callable[[int], str]:
    """Returns a function from the number of a row to its name; names are determined on first use.

    Args:
        dataset: any dataset with a length.
        source: name of the rows if neither the dataset nor its rows have one: `source[17]`.
        id_column: column of row names; if None or missing, rows are named by file and line, or by number.
    """

    @cache
    def names() -> RowNames:
        try:
            found = row_names(dataset, id_column=id_column, source=source)
            found.find_name(0)
        except DataError:
            return row_names(dataset, source=source)
        return found

    return lambda number: str(names().find_name(number))
