"""The file of the quarantine in the output directory, with one sample per line, which `sample_filter.py` leaves out.

{"name": "reviews.csv:130", "source": "train", "line": 130, "file": "reviews.csv", "fingerprint": "…", "rows": 400}
{"column": "id", "sample": "doc-3"}    the value of a column
{"sample": 17}                         the number of a row that has no name: valid for one state of the data only
{"sources": {"train": 400}}            the data for which such numbers were first read
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from trainwright._types import JSONObject, is_count
from trainwright.capability_table import find_row
from trainwright.data.identity import SampleId, Seen, as_hex, parse_hex
from trainwright.data.sample_filter import Sample
from trainwright.errors import DataError
from trainwright.support.door import OwnFolder, RelativeName, parse_json, read_bytes

QUARANTINE_NAME = find_row("quarantine").run_files[0].name

MAX_BYTES = 256 << 20  # of the file


@dataclass(frozen=True, slots=True)
class Named:
    """A sample named in the file, with the information needed to find it in changed data."""

    name: SampleId
    seen: Seen


Entry: TypeAlias = Sample | Named
Sizes: TypeAlias = "Mapping[str, int | None]"  # rows of each source; None for a stream


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Content of the file.

    Attributes:
        entries: the samples, without duplicates, in the order of the file.
        sizes: sizes of the data that the numbers refer to; None if they were not read before.
    """

    entries: tuple[Entry, ...] = ()
    sizes: Sizes | None = None


def read_quarantine(folder: str | Path) -> Quarantined:
    """Reads which samples are excluded in an output directory; returns none if there is no file.

    An incomplete last line is ignored. Raises DataError if any other line is invalid.
    """
    path = Path(folder) / QUARANTINE_NAME
    if not path.is_file():
        return Quarantined()
    try:
        content = read_bytes(path, max_bytes=MAX_BYTES)
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    lines = content.decode(errors="replace").split("\n")[:-1]
    entries: dict[Entry, None] = {}
    sizes: Sizes | None = None
    for number, line in enumerate(lines, start=1):
        try:
            values = parse_json(line)
            if "sources" in values:
                sizes = _sizes_in(values["sources"])
            else:
                entries[_entry_in(values)] = None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DataError(
                f'{path}, line {number}: {line[:80]!r} is not of the form {{"name": "chat[17]", "source": "chat", '
                '"row": 17} or {"column": "id", "sample": "doc-3"}.'
            ) from None
    return Quarantined(tuple(entries), sizes)


def _entry_in(values: JSONObject) -> Entry:
    """Returns the entry of a line; ValueError for an invalid one."""
    if "name" in values:
        num_rows = values.get("rows")
        if num_rows is not None and not is_count(num_rows):
            raise ValueError("the number of rows is missing or invalid")
        return Named(SampleId.from_dict(values), Seen(parse_hex(values.get("fingerprint")), num_rows))
    sample = values["sample"]
    column = values.get("column")
    if isinstance(column, str) and type(sample) in (int, str):
        return column, sample
    if column is not None or not is_count(sample):
        raise ValueError("no sample")
    return int(sample)


def _sizes_in(values: Mapping[str, Any]) -> Sizes:
    if not all(size is None or is_count(size) for size in values.values()):
        raise ValueError("the numbers of rows are missing or invalid")
    return dict(values)


def _format_line(entry: Entry) -> JSONObject:
    if isinstance(entry, tuple):
        return {"column": entry[0], "sample": entry[1]}
    if isinstance(entry, int):
        return {"sample": entry}
    values = entry.name.to_dict()
    if entry.seen.content is not None:
        values["fingerprint"] = as_hex(entry.seen.content)
    if entry.seen.num_rows is not None:
        values["rows"] = entry.seen.num_rows
    return values


def add_to_quarantine(folder: str | Path, entries: Iterable[Entry]) -> None:
    """Appends samples to the file in an output directory, creating the directory if needed."""
    _append(folder, map(_format_line, entries))


def note_sizes(folder: str | Path, sizes: Sizes) -> None:
    """Appends the sizes of the data that the numbers in the file refer to."""
    _append(folder, [{"sources": dict(sizes)}])


def _append(folder: str | Path, lines: Iterable[JSONObject]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    with OwnFolder(folder).open(RelativeName.parse(QUARANTINE_NAME), "ab") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
