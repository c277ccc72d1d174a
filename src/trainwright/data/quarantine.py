"""Quarantine: samples that are excluded from training, as a file of the output directory has them, one a line.

A sample is an index of the dataset, its place in a stream that has one order, or a value of a column: {"sample": 17},
or {"column": "id", "sample": "doc-3"}. Of a mixture with streams it is the number that the ledger has.

Of samples 0 to 5, with 2 and 3 in quarantine, an epoch in the order 4 2 0 3 5 1 becomes 4 0 5 1. A position in it is
one of the whole order: after 4 0 it is 4, of 6. A resume finds it whatever is in quarantine then: what comes before it
is done, and what comes after it is trained unless it is excluded.

A run in whose epoch samples come into quarantine fetches the rest of it again, as a resume there would.

Where the order of an epoch cannot be computed (a sampler's), or batches are formed by length, batches lose the sample,
and an epoch has as many of them. With shares of a mixture an epoch keeps its length: the next sample of the same source
takes the place of an excluded one.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from trainwright._types import QUARANTINE_NAME, Item, is_count
from trainwright.errors import DataError

NO_PLACES = (
    "A place names a sample of a stream only where all processes and workers read the whole stream, in the same order "
    "in each epoch. Name samples by a column whose values differ: trainer.quarantine(['doc-3'], column='id')."
)
Sample: TypeAlias = int | tuple[str, int | str]  # a number, or a column and its value


def read_quarantine(folder: str | Path) -> set[Sample]:
    """Reads which samples are excluded in an output directory; none if there is no file.

    A last line that was not finished is not read; a DataError if another one is invalid.
    """
    path = Path(folder) / QUARANTINE_NAME
    if not path.is_file():
        return set()
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    found: set[Sample] = set()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            sample = entry["sample"]
            column = entry.get("column")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            sample = column = None
        if isinstance(column, str) and type(sample) in (int, str):
            found.add((column, sample))
        elif column is None and is_count(sample):
            found.add(sample)
        else:
            raise DataError(
                f'{path}, line {number}: {line[:80]!r} is not of the form {{"sample": 17}} or '
                '{"column": "id", "sample": "doc-3"}.'
            )
    return found


def add_to_quarantine(folder: str | Path, samples: Iterable[Sample]) -> None:
    """Appends samples to the file in an output directory, which is made if it is not there."""
    entries = [{"column": one[0], "sample": one[1]} if isinstance(one, tuple) else {"sample": one} for one in samples]
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / QUARANTINE_NAME).open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(entry) + "\n" for entry in entries))


class KeptItems(Iterator[Item]):
    """The items of a stream that are not excluded.

    Args:
        items: from a position on.
        position: items before the first of these.
        excluded: returns the samples that are excluded now.
        number: returns by which number the item read last is known; None: by its position.
        names_items: the numbers name items, whoever reads the stream and in whatever epoch.

    Attributes:
        position: items before the next one, those that are excluded included.
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
        """Returns the numbers of the items given since the last call; none where they name no items."""
        numbers = self._given
        self._given = []
        return numbers

    def pass_over(self, number: int, *, stop: int) -> bool:
        """Reads so many items, but none at or after a position; returns False if the stream has ended."""
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
                f"{QUARANTINE_NAME} names samples by {' and '.join(sorted(columns))}, which a row of the stream does "
                "not have (remove_unused_columns=True removes what the model does not take)."
            ) from None


def substitutes(excluded: Collection[int], num_samples: int, starts: Sequence[int] = (0,)) -> dict[int, int]:
    """Returns which sample takes the place of each excluded one; a DataError if none would be left.

    It is the next one of the same source, from the first again after the last; of another source only where nothing is
    left of that one. `starts` are the first samples of the sources. Indices beyond the end of the dataset have no
    effect.
    """
    excluded = {sample for sample in excluded if sample < num_samples}
    if excluded and len(excluded) >= num_samples:
        raise DataError(f"All {num_samples} samples are in quarantine. Delete {QUARANTINE_NAME}, or lines of it.")
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
