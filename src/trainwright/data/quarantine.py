"""Quarantine: samples excluded from training, and the file in the output directory, with one sample per line.

    {"name": "reviews.csv:130", "source": "train", "line": 130, "file": "reviews.csv", "fingerprint": "…", "rows": 400}
    {"column": "id", "sample": "doc-3"}    the value of a column
    {"sample": 17}                         a number, as version 0.2 wrote it: valid for one state of the data only
    {"sources": {"train": 400}}            the data for which such numbers were first read

With samples 2 and 3 of 0 to 5 in quarantine, an epoch in the order 4 2 0 3 5 1 becomes 4 0 5 1. A position in it
refers to the whole order: after 4 0 it is 4, of 6. A resume finds it whatever is in quarantine by then: everything
before it is done, and everything after it is trained unless it is excluded.

If samples are put in quarantine during an epoch, the run fetches the rest of the epoch again, as a resume would.

If the order of an epoch cannot be computed (a sampler's), or batches are formed by length, batches lose the sample, and
the number of batches stays the same. With shares of a mixture, an epoch keeps its length: the next sample of the same
source takes the place of an excluded one.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from trainwright._types import QUARANTINE_NAME, Item, JSONObject, is_count
from trainwright.data.identity import SampleId, Seen, as_hex, of_hex
from trainwright.errors import DataError
from trainwright.support.door import OwnFolder, RelativeName, parse_json, read_bytes

MAX_BYTES = 256 << 20  # of the file
NO_PLACES = (
    "A position only identifies a sample of a stream if all processes and workers read the whole stream, in the same "
    "order in each epoch. Name samples by a column of unique values: trainer.quarantine(['doc-3'], column='id')."
)
Sample: TypeAlias = int | tuple[str, int | str]  # a number, or a column and its value


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
        return Named(SampleId.from_dict(values), Seen(of_hex(values.get("fingerprint")), num_rows))
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


def _line_of(entry: Entry) -> JSONObject:
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
    _append(folder, map(_line_of, entries))


def note_sizes(folder: str | Path, sizes: Sizes) -> None:
    """Appends the sizes of the data that the numbers in the file refer to."""
    _append(folder, [{"sources": dict(sizes)}])


def _append(folder: str | Path, lines: Iterable[JSONObject]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    with OwnFolder(folder).open(RelativeName.parse(QUARANTINE_NAME), "ab") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())


class KeptItems(Iterator[Item]):
    """The items of a stream that are not excluded.

    Args:
        items: the items from a position on.
        position: number of items before the first of these.
        excluded: returns the currently excluded samples.
        number: returns the number of the last item read; None if its position is its number.
        names_items: whether numbers identify items in every epoch and for every reader of the stream.

    Attributes:
        position: number of items before the next one, including excluded ones.
    """

    def __init__(
        self,
        items: Iterator[Item],
        position: int,
        excluded: Callable[[], Set[Sample]],
        *,
        number: Callable[[], int] | None = None,
        names_items: bool = True,
    ) -> None:
        self.position = position
        self._items = items
        self._excluded = excluded
        self._number = number
        self._names_items = names_items
        self._given: list[int] = []

    def __next__(self) -> Item:
        while True:
            item = next(self._items)
            number = self.position if self._number is None else self._number()
            self.position += 1
            if not self._is_excluded(item, number):
                if self._names_items:
                    self._given.append(number)
                return item

    def numbers_given(self) -> list[int]:
        """Returns the numbers of the items yielded since the last call; empty if numbers do not identify items."""
        numbers = self._given
        self._given = []
        return numbers

    def pass_over(self, number: int, *, stop: int) -> bool:
        """Skips `number` items, but none at or after `stop`; returns False if the stream has ended."""
        position = self.position
        while number > 0 and self.position < stop:
            try:
                item = next(self._items)
            except StopIteration:
                break
            place = self.position if self._number is None else self._number()
            self.position += 1
            number -= not self._is_excluded(item, place)
        return self.position > position

    def _is_excluded(self, item: Item, number: int) -> bool:
        excluded = self._excluded()
        if not excluded:
            return False
        if number in excluded:
            return True
        columns = {one[0] for one in excluded if isinstance(one, tuple)}
        try:
            values = [(column, item[column]) for column in columns]
            return any((name, one.item() if hasattr(one, "item") else one) in excluded for name, one in values)
        except (KeyError, TypeError, IndexError):
            raise DataError(
                f"{QUARANTINE_NAME} names samples by {' and '.join(sorted(columns))}, but rows of the stream do "
                "not have this column (remove_unused_columns=True removes columns that the model does not take)."
            ) from None


def substitutes(excluded: Collection[int], num_samples: int, starts: Sequence[int] = (0,)) -> dict[int, int]:
    """Returns the replacement for each excluded sample; DataError if no sample would remain.

    It is the next sample of the same source, continuing at the first after the last; of another source only if nothing
    remains of that one. `starts` are the first samples of the sources. Indices beyond the end of the dataset have no
    effect.
    """
    excluded = {sample for sample in excluded if sample < num_samples}
    if excluded and len(excluded) >= num_samples:
        raise DataError(f"All {num_samples} samples are in quarantine. Delete {QUARANTINE_NAME}, or some of its lines.")
    found: dict[int, int] = {}
    for sample in excluded:
        source = bisect_right(starts, sample)
        first = starts[source - 1]
        stop = starts[source] if source < len(starts) else num_samples
        others = chain(range(sample + 1, stop), range(first, sample), range(stop, num_samples), range(first))
        found[sample] = next(other for other in others if other not in excluded)
    return found


def without(group: list[Any], excluded: Collection[int]) -> list[Any]:
    """Returns a batch formed by length (indices, or rows of pieces of samples) without its excluded samples."""
    if group and isinstance(group[0], list):
        return [row for one in group if (row := without(one, excluded))]
    return [one for one in group if (one[0] if isinstance(one, tuple) else one) not in excluded]
