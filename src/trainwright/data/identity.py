"""Identity of rows: a name that stays valid when the data changes, and a fingerprint of the content.

    reviews.csv:130   line 130 of a file, as an editor shows it
    table.parquet[7]  row 7 of a file without lines, from 0
    chat[17]          row 17 of a source, from 0, before any rows were held out; or the position in a stream
    doc-3             value of the column that names rows
    book.txt:12#3     sample 3, from 0, of the samples that a row was cut into

The trainer knows a sample by its number (`sample_ids.py`), which is valid for one state of the data only. A name is
kept together with the fingerprint of the row, so that `follow` finds the row in another state of the data.
`row_names.py` provides the names of a dataset; nothing here reads data.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Protocol, TypeAlias
from uuid import UUID

import numpy as np
import torch
import xxhash

from trainwright._types import JSONObject, is_count
from trainwright.errors import DataError

# Any: a row and its values are the user's own types.


@dataclass(frozen=True, slots=True)
class SampleId:
    """Name of a sample of the training data.

    Attributes:
        source: name of its dataset in a dict of datasets; `train` for a single dataset.
        row: number of its row: a line, from 1, if `is_line`; otherwise an index or a position in a stream, from 0.
        file: file of the row, without its directory unless another file has the same name; None: not read from a file.
        is_line: `row` is a line of the file.
        part: number of the sample in its row, from 0; None if the row is one sample.
        key: value of the column that names rows; None if there is no such column.
    """

    source: str
    row: int
    file: str | None = None
    is_line: bool = False
    part: int | None = None
    key: str | int | None = None

    def __str__(self) -> str:
        if self.key is not None:
            text = str(self.key)
        elif self.is_line:
            text = f"{self.file}:{self.row}"
        else:
            text = f"{self.source if self.file is None else self.file}[{self.row}]"
        return text if self.part is None else f"{text}#{self.part}"

    @property
    def place(self) -> tuple[object, ...]:
        """The part of a name that distinguishes samples: the key if there is one, regardless of the source."""
        if self.key is not None:
            return (self.key, self.part)
        return (None if self.file is not None else self.source, self.file, self.row, self.part)

    def to_dict(self) -> JSONObject:
        """Returns plain values for a file, without fields that are not set."""
        values: JSONObject = {"name": str(self), "source": self.source, "line" if self.is_line else "row": self.row}
        values |= {name: value for name in ("file", "part", "key") if (value := getattr(self, name)) is not None}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SampleId:
        """Returns the name that `to_dict` wrote; raises ValueError for invalid values."""
        is_line = "line" in values
        row = values.get("line" if is_line else "row")
        source = values.get("source")
        file = values.get("file")
        part = values.get("part")
        key = values.get("key")
        is_sound = (
            isinstance(source, str)
            and is_count(row)
            and isinstance(file, str | None)
            and (part is None or is_count(part))
            and isinstance(key, str | int | None)
            and (file is not None or not is_line)
        )
        if not is_sound:
            raise ValueError(f"{dict(values)!r} does not name a row.")
        return cls(str(source), int(row), file, is_line, part, key)  # type: ignore[arg-type]


# -- fingerprints ------------------------------------------------------------------------------------------------------


HEX_DIGITS = 16
NUMBERS = {"i": "int64", "u": "int64", "f": "float64", "b": "bool"}  # kind of a dtype -> the dtype used for comparison
WRITTEN = (date, time, timedelta, Decimal, UUID, PurePath)  # values identified by their text form


def fingerprint(row: Any) -> int:
    """Returns 64 bits that differ for rows with different content.

    Entries of a mapping count in the order of their names. Numbers are the same in a list, an array or a tensor, in any
    precision that represents them exactly; integers and fractions are distinct. Raises DataError for a value without
    content of its own, such as a function or an open file.
    """
    digest = xxhash.xxh3_64()
    _feed(digest, row)
    return digest.intdigest()


def as_hex(content: int) -> str:
    """Returns a fingerprint as 16 hex digits, the form used in files."""
    return f"{content:016x}"


def parse_hex(text: object) -> int | None:
    """Returns the fingerprint in a file; None if there is none. Raises ValueError for other text."""
    if text is None:
        return None
    if not isinstance(text, str) or len(text) != HEX_DIGITS:
        raise ValueError(f"{text!r} is not a fingerprint")
    return int(text, 16)


def _feed(digest: xxhash.xxh3_64, value: Any) -> None:
    """Adds a value to a digest: a letter for its type, its size, its content."""
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
            f"A row has a {type(value).__name__}, which cannot be compared between runs. Name rows by a column of ids."
        )


def _feed_array(digest: xxhash.xxh3_64, values: np.ndarray[Any, Any]) -> None:
    """Adds numbers as 64 bits each, dimension by dimension, like nested lists of the same numbers."""
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


class Names(Protocol):
    """Names of the samples of one state of the data (`row_names.RowNames`)."""

    def find_name(self, number: int) -> SampleId: ...
    def find_numbers(self, name: SampleId) -> Sequence[int]: ...
    def read_fingerprint(self, number: int) -> int | None: ...
    def contents(self) -> Iterable[tuple[int, int | None]]: ...
    def find_size(self, name: SampleId) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """Information kept about a sample besides its name.

    Attributes:
        content: fingerprint of its row; None if the row could not be read.
        num_rows: rows of its source at that time; None if the source has no length.
    """

    content: int | None = None
    num_rows: int | None = None


@dataclass(frozen=True, slots=True)
class Followed:
    """Location of samples named in one state of the data in another state.

    Attributes:
        numbers: for each sample found, the current numbers of the samples with its name or content.
        moved: samples with a new name, and that name.
        changed: samples with a name that now belongs to other content, and with content not found elsewhere.
        gone: samples of which neither the name nor the content exists any more.
        unmatched: samples known only by name, in a source that has changed.
    """

    numbers: dict[SampleId, list[int]] = field(default_factory=dict)
    moved: dict[SampleId, SampleId] = field(default_factory=dict)
    changed: list[SampleId] = field(default_factory=list)
    gone: list[SampleId] = field(default_factory=list)
    unmatched: list[SampleId] = field(default_factory=list)


def follow(before: Mapping[SampleId, Seen], names: Names, *, changed: Collection[str] = ()) -> Followed:
    """Finds samples by name and content.

    A sample with the same name and content is unmoved. Others are searched for by content, first in their own source,
    then in other sources; among several samples with the same content, each is used once, in order. A sample with a key
    is identified by it whatever its content, since its name does not depend on its position. A sample without a
    fingerprint is found by its name, but only if its source has the same number of rows as before and no sample of it
    was lost.

    Args:
        before: the named samples, and the information kept about them.
        names: names in the current data. All of its rows are read only if a sample has moved.
        changed: sources known to have other rows now.
    """
    found = Followed()
    lost: list[SampleId] = []  # to be searched for by content
    unread: list[SampleId] = []  # content not known, before or now
    for name, seen in before.items():
        numbers = list(names.find_numbers(name))
        contents = {names.read_fingerprint(number) for number in numbers} if seen.content is not None else {None}
        if name.key is not None and numbers:
            found.numbers[name] = numbers
        elif name.key is not None:
            found.gone.append(name)
        elif None in contents:
            unread.append(name)
        elif contents == {seen.content}:
            found.numbers[name] = numbers
        else:
            lost.append(name)
    _find_by_content(found, before, sorted(lost, key=_order), names)
    other = {_split_name(name) for name in lost}
    for name in unread:
        numbers = list(names.find_numbers(name))
        is_changed = name.source in changed or _split_name(name) in other
        if is_changed or names.find_size(name) != before[name].num_rows:
            found.unmatched.append(name)
        elif numbers:
            found.numbers[name] = numbers
        else:
            found.gone.append(name)
    return found


Group: TypeAlias = "tuple[SampleId, list[int]]"  # a current name, and the samples that have it


def _find_by_content(found: Followed, before: Mapping[SampleId, Seen], lost: Sequence[SampleId], names: Names) -> None:
    """Searches for the samples that have moved; reads nothing if there are none."""
    if not lost:
        return
    taken = {number for numbers in found.numbers.values() for number in numbers}
    free = _groups_by_content(names, taken)
    elsewhere = []
    for name in lost:
        groups = free[before[name].content, name.part]
        if not _take(found, name, groups.get(_split_name(name))):
            elsewhere.append(name)
    for name in elsewhere:
        others = free[before[name].content, name.part].values()
        if not _take(found, name, next((groups for groups in others if groups), None)):
            (found.changed if names.find_numbers(name) else found.gone).append(name)


def _groups_by_content(
    names: Names, taken: Collection[int]
) -> defaultdict[tuple[int | None, int | None], dict[object, deque[Group]]]:
    """Returns (fingerprint, part) -> source -> samples of one name, in order, without samples already taken.

    The samples cut from one row are also listed together under the part None.
    """
    groups: dict[tuple[object, ...], tuple[int | None, Group]] = {}
    for number, content in names.contents():
        if number in taken:
            continue
        name = names.find_name(number)
        for one in (name,) if name.part is None else (name, replace(name, part=None)):
            groups.setdefault(one.place, (content, (one, [])))[1][1].append(number)
    free: defaultdict[tuple[int | None, int | None], dict[object, deque[Group]]] = defaultdict(dict)
    for content, group in groups.values():
        free[content, group[0].part].setdefault(_split_name(group[0]), deque()).append(group)
    return free


def _take(found: Followed, name: SampleId, groups: deque[Group] | None) -> bool:
    """Takes the first of some groups as the samples that had a name; returns False if there is none."""
    if not groups:
        return False
    now, numbers = groups.popleft()
    found.numbers[name] = numbers
    if now != name:
        found.moved[name] = now
    return True


def _split_name(name: SampleId) -> tuple[str, str | None]:
    return name.source, name.file


def _order(name: SampleId) -> tuple[str, str, int, int]:
    return name.source, name.file or "", name.row, name.part or 0


def listed(names: Sequence[object], most: int = 10) -> str:
    """Returns the first names as text, and how many more there are."""
    more = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
