"""Names of rows that stay right when the data changes: a source and the row in it as the user knows it, or a key.

    reviews.csv:130   line 130 of a file, as an editor shows it
    chat[17]          row 17 of a source, from 0, before any rows were held out; or the place in a stream
    doc-3             the value of the column that names rows

A number, by which the trainer knows a sample (`sample_ids.py`), means something for one state of the data only. A name
is kept with the fingerprint of the row's content, and `follow` finds where the rows of another state are now. Nothing
here reads files or decides which rows to look at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import accumulate
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch
import xxhash

from trainwright._types import JSONObject, is_count
from trainwright.errors import DataError

# Any: a row and its values are the user's own types.


@dataclass(frozen=True, slots=True)
class SampleId:
    """The name of a row.

    Attributes:
        source: name of the dataset or file.
        row: number of the row in it: the line of a file, from 1; otherwise its index or place, from 0.
        is_line: the row is a line of a file.
        key: value of the column that names rows; None: there is no such column.
    """

    source: str
    row: int
    is_line: bool = False
    key: str | int | None = None

    def __str__(self) -> str:
        if self.key is not None:
            return str(self.key)
        return f"{self.source}:{self.row}" if self.is_line else f"{self.source}[{self.row}]"

    def to_dict(self) -> JSONObject:
        """Plain values for a file, without what is not set."""
        values: JSONObject = {"source": self.source, "line" if self.is_line else "row": self.row}
        if self.key is not None:
            values["key"] = self.key
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SampleId:
        """The name in a file; ValueError for what no run writes."""
        is_line = "line" in values
        source = values.get("source")
        row: Any = values.get("line" if is_line else "row")
        key = values.get("key")
        if not isinstance(source, str) or not is_count(row) or not isinstance(key, str | int | None):
            raise ValueError(f"{dict(values)!r} does not name a row.")
        return cls(source, int(row), is_line, key)


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of one source, in the order in which the training data has them.

    Attributes:
        name: of the source.
        rows: for each row its number as the user knows it. A range, or an array where some rows were held out, or
            a row takes several lines of its file.
        is_file: the numbers are lines of a file.
        keys: values of the column that names rows; None: there is no such column.
    """

    name: str
    rows: Sequence[int]
    is_file: bool = False
    keys: Sequence[str | int] | None = None

    def name_of(self, place: int) -> SampleId:
        """The name of the row at a place, from 0."""
        key = None if self.keys is None else self.keys[place]
        return SampleId(self.source_name, int(self.rows[place]), self.is_file, key)

    @property
    def source_name(self) -> str:
        """The name as it is shown: of a file without its folder."""
        return self.name.replace("\\", "/").rsplit("/", 1)[-1] if self.is_file else self.name


class RowNames:
    """Names of the rows of training data, of which each source follows the one before it.

    Args:
        sources: at least one; no two have the same name.

    Raises:
        DataError: two sources, or two rows that a column names, have the same name.
    """

    def __init__(self, sources: Iterable[SourceRows]) -> None:
        self.sources = list(sources)
        self._starts = [0, *accumulate(len(source.rows) for source in self.sources)]
        self._length = self._starts.pop()
        self._numbers: dict[SampleId, int] | None = None
        shown = [source.source_name for source in self.sources]
        for name in shown:
            if shown.count(name) > 1:
                raise DataError(f"Two sources of the training data are called {name!r}. Give each a name of its own.")

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[SampleId]:
        return (source.name_of(place) for source in self.sources for place in range(len(source.rows)))

    def name_of(self, number: int) -> SampleId:
        """The name of a sample; IndexError for a number that the data does not have."""
        if not 0 <= number < self._length:
            raise IndexError(f"sample {number} is not one of {self._length}")
        source = bisect_right(self._starts, number) - 1
        return self.sources[source].name_of(number - self._starts[source])

    def number_of(self, name: SampleId) -> int | None:
        """The number of the sample with a name; None where the data does not have it."""
        if self._numbers is None:
            self._numbers = {}
            for number, one in enumerate(self):
                if self._numbers.setdefault(_place(one), number) != number:
                    raise DataError(f"Two rows of the training data are called {one}. Name rows by a column of ids.")
        return self._numbers.get(_place(name))


def _place(name: SampleId) -> SampleId:
    """The part of a name that tells rows apart: the key where there is one, of whatever source."""
    return name if name.key is None else SampleId("", 0, key=name.key)


# -- fingerprints ------------------------------------------------------------------------------------------------------


NUMBERS = {"i": "int64", "u": "int64", "f": "float64", "b": "bool"}  # kind of a dtype -> the one that is compared
WRITTEN = (date, time, timedelta, Decimal, UUID, PurePath)  # values that are what they are written as


def fingerprint(row: Any) -> str:
    """16 hex digits that differ for rows of other content.

    Entries of a mapping count in the order of their names. Numbers are the same in a list, an array or a tensor, of
    whatever precision they are exact in; a whole number and a fraction are not. Raises DataError for a value that has
    no content of its own, as a function or an open file.
    """
    digest = xxhash.xxh3_64()
    _feed(digest, row)
    return digest.hexdigest()


def _feed(digest: xxhash.xxh3_64, value: Any) -> None:
    """Adds a value to a digest: a letter for its kind, its size, its content."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if value is None:
        digest.update(b"n")
    elif isinstance(value, str):
        _feed_bytes(digest, b"s", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray)):
        _feed_bytes(digest, b"b", bytes(value))
    elif isinstance(value, (bool, int, float, np.ndarray, np.generic)):
        _feed_array(digest, np.asarray(value))
    elif isinstance(value, Mapping):
        digest.update(b"m%d;" % len(value))
        for name in sorted(value, key=str):
            _feed(digest, str(name))
            _feed(digest, value[name])
    elif isinstance(value, (list, tuple)):
        kinds = {type(one) for one in value}
        numbers = np.array(value) if kinds in ({int}, {float}, {bool}) else None
        if numbers is not None and numbers.dtype.kind in NUMBERS:
            _feed_array(digest, numbers)
        else:
            _feed_each(digest, value)
    elif isinstance(value, WRITTEN):
        _feed_bytes(digest, b"w", str(value).encode())
    elif callable(getattr(value, "tobytes", None)):  # an image
        _feed_bytes(digest, b"i", repr((getattr(value, "mode", ""), getattr(value, "size", ""))).encode())
        _feed_bytes(digest, b"b", value.tobytes())
    else:
        raise DataError(
            f"A row has a {type(value).__name__}, whose content cannot be compared with that of another run. Name rows "
            "by a column of ids."
        )


def _feed_array(digest: xxhash.xxh3_64, values: np.ndarray[Any, Any]) -> None:
    """Adds numbers as 64 bits each, one dimension after the other, as nested lists of them are added."""
    if values.dtype.kind not in NUMBERS:
        _feed(digest, values.tolist() if values.ndim else str(values.item()))
    elif values.ndim > 1 or values.shape == (0,):
        _feed_each(digest, values)
    else:
        kind = NUMBERS[values.dtype.kind]
        digest.update(f"{kind}{values.shape};".encode())
        digest.update(np.ascontiguousarray(values, dtype=kind).tobytes())


def _feed_each(digest: xxhash.xxh3_64, values: Iterable[Any]) -> None:
    values = list(values)
    digest.update(b"l%d;" % len(values))
    for one in values:
        _feed(digest, one)


def _feed_bytes(digest: xxhash.xxh3_64, kind: bytes, content: bytes) -> None:
    digest.update(kind + b"%d;" % len(content))
    digest.update(content)


# -- another state of the data -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Followed:
    """Where rows that were named in one state of the data are in another one.

    Attributes:
        numbers: of each row that was found, the number of its sample now.
        moved: rows that have another name now, with that name.
        changed: rows whose name belongs to other content now, and whose content is nowhere else.
        gone: rows whose name and content are not there any more.
    """

    numbers: dict[SampleId, int] = field(default_factory=dict)
    moved: dict[SampleId, SampleId] = field(default_factory=dict)
    changed: list[SampleId] = field(default_factory=list)
    gone: list[SampleId] = field(default_factory=list)


def follow(before: Mapping[SampleId, str], names: RowNames, fingerprints: Sequence[str]) -> Followed:
    """Finds rows by name and content.

    A row that has its name and its content is where it was. Another one is looked for by content, first in its own
    source, then in the others; of several rows with the same content each is taken once, in their order. A row that a
    column names is itself whatever its content, since its name does not depend on its place.

    Args:
        before: the rows that were named, with their fingerprints then.
        names: of the data now.
        fingerprints: of the data now, one for each row.
    """
    found = Followed()
    lost: list[SampleId] = []
    for name, content in before.items():
        number = names.number_of(name)
        if number is not None and (name.key is not None or fingerprints[number] == content):
            found.numbers[name] = number
        else:
            lost.append(name)
    lost.sort(key=lambda name: (name.source, name.row))
    free = _rows_by_content(names, fingerprints, taken=set(found.numbers.values()))
    elsewhere = [name for name in lost if not _take(found, name, free[before[name]].get(name.source), names)]
    for name in elsewhere:
        rows = next((rows for rows in free[before[name]].values() if rows), None)
        if not _take(found, name, rows, names):
            (found.gone if names.number_of(name) is None else found.changed).append(name)
    return found


def _rows_by_content(
    names: RowNames, fingerprints: Sequence[str], *, taken: set[int]
) -> dict[str, dict[str, deque[int]]]:
    """Returns fingerprint -> source -> numbers of the rows, in order, without those that are taken."""
    rows: dict[str, dict[str, deque[int]]] = defaultdict(dict)
    for number, content in enumerate(fingerprints):
        if number not in taken:
            rows[content].setdefault(names.name_of(number).source, deque()).append(number)
    return rows


def _take(found: Followed, name: SampleId, rows: deque[int] | None, names: RowNames) -> bool:
    """Notes the first of some rows as the one that had a name; returns False if there is none."""
    if not rows:
        return False
    number = rows.popleft()
    found.numbers[name] = number
    found.moved[name] = names.name_of(number)
    return True
