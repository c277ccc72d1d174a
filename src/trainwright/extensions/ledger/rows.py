"""Rows of a ledger: their names and fingerprints for its file, and their places in the data when the file is read.

Rows have to be read for their fingerprints, unless the dataset has them at hand. That is done before each file is
written, largest losses first, within a share of the time since the file before; a run that ends takes a little longer.
Some rows, spread over the data, are read for the first file; a resume compares them to see which sources have changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trainwright._types import JSONObject, counted
from trainwright.data.identity import SampleId, Seen, as_hex, follow, listed
from trainwright.data.ledger import (
    Array,
    Columns,
    as_table,
    columns_in,
    identities,
    identity_columns,
    is_without_names,
    read_table,
)
from trainwright.data.row_names import NamesOf, RowNames
from trainwright.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

PROBES = 256  # rows of all sources together that show whether the data has changed
PROBE_S = 0.25  # for reading them
SHARE = 0.01  # of the time since the last file, for reading rows
LEAST_S = 0.02  # likewise
LEAST_AT_END_S = 2.0
Probes: TypeAlias = dict[str, dict[str, str | None]]  # source -> place of a row -> fingerprint
CURE = (
    "Name rows by a column that does not change (id_column='id'), or train on the data of then. Without ledger.parquet "
    "in the checkpoint the ledger begins with this run."
)


class LedgerRows:
    """Names and fingerprints of the samples of a ledger.

    Args:
        names: of the samples of the training data.
    """

    def __init__(self, names: NamesOf) -> None:
        self._names_of = names
        self._since = time.monotonic()
        self._contents: dict[int, int | None] = {}  # of the rows that were read
        self._probes: Probes | None = None

    @property
    def _names(self) -> RowNames:
        return self._names_of()

    # -- into a file ---------------------------------------------------------------------------------------------------

    def about(self) -> JSONObject:
        """Returns what the metadata of a ledger says of its data."""
        names = self._names
        if self._probes is None:
            self._probes = self._read_probes()
        return {
            "num_samples": len(names) or None,
            "sources": names.sizes,
            "id_column": names.id_column,
            "probes": self._probes,
        }

    def _read_probes(self) -> Probes:
        end = time.monotonic() + PROBE_S
        sources = self._names.sources
        found: Probes = {}
        for source in sources:
            of_source = found.setdefault(source.name, {})
            for place in _spread(source.size or 0, PROBES // len(sources)):
                of_source[str(place)] = self._text_at(source.name, place)
                if time.monotonic() > end:
                    break
        return found

    def _text_at(self, source: str, place: int) -> str | None:
        """Returns the fingerprint of the row at a place of a source, as text."""
        number = self._names.number_at(source, place)
        content = None if number is None else self._content_of(number)
        return None if content is None else as_hex(content)

    def _content_of(self, number: int) -> int | None:
        source, place = self._names.source_and_place(number)
        if source.keeps_contents:
            return source.content_of(place)
        if number not in self._contents:
            self._contents[number] = source.content_of(place)
        return self._contents[number]

    def read_contents(self, noted: Columns, *, is_end: bool) -> None:
        """Reads the rows of samples for their fingerprints, largest mean loss first, until its time is over."""
        now = time.monotonic()
        end = now + max(LEAST_AT_END_S if is_end else LEAST_S, SHARE * (now - self._since))
        self._since = now
        order = np.argsort(-np.nan_to_num(noted["mean_loss"], nan=-np.inf), kind="stable")
        for number in noted["sample"][order].tolist():
            if time.monotonic() > end:
                logger.info("The ledger has fingerprints of %s.", counted(len(self._contents), "row"))
                return
            self._content_of(number)

    def table(self, noted: Columns, about: JSONObject) -> pa.Table:
        """Returns the table of a ledger's file."""
        names = self._names
        samples = noted["sample"].tolist()
        contents = []
        for number in samples:
            source, place = names.source_and_place(number)
            contents.append(source.content_of(place) if source.keeps_contents else self._contents.get(number))
        return as_table(noted, identity_columns([names.name_of(number) for number in samples], contents), about)

    # -- out of a file -------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> Columns:
        """Reads the ledger of a checkpoint, by the numbers that its samples have in the data now.

        Rows that changed or vanished are left out, with a warning. Raises DataError if the file is not a ledger, or
        rows cannot be matched with the data.
        """
        table, about = read_table(path)
        columns = columns_in(table, path)
        if is_without_names(about):
            numbers = self._numbers_of_older(table, about, path)
        elif self._is_same_data(table, about):
            return columns
        else:
            numbers = self._followed(table, about, path)
        kept = numbers >= 0
        found = {name: column[kept] for name, column in columns.items()}
        return {**found, "sample": numbers[kept]}

    def is_same(self, about: JSONObject) -> bool:
        """Returns whether the data is the data of then, by its size and by some rows of it."""
        sizes = about.get("sources")
        return sizes is not None and list(sizes.items()) == list(self._names.sizes.items()) and not self._changed(about)

    def _changed(self, about: JSONObject) -> set[str]:
        """Returns the sources of which a row that was read then is another one now."""
        probes: Probes = about["probes"]
        return {
            source
            for source, rows in probes.items()
            if any(self._text_at(source, int(place)) != content for place, content in rows.items())
        }

    def _is_same_data(self, table: pa.Table, about: JSONObject) -> bool:
        """Returns whether all samples have the names and, as far as they are at hand, the contents of then."""
        if not self.is_same(about):
            return False
        names = self._names
        lists = {name: table[name].to_pylist() for name in table.column_names}
        end = time.monotonic() + PROBE_S
        for number, (name, content) in zip(lists["sample"], identities(lists), strict=True):
            source, place = names.source_and_place(number)
            if source.name_of(place) != name:
                return False
            is_compared = content is not None and (source.keeps_contents or time.monotonic() < end)
            if is_compared and self._content_of(number) != content:
                return False
        return True

    def _followed(self, table: pa.Table, about: JSONObject, path: Path) -> Array:
        """Returns the number of each sample now; -1 for one that is not there any more."""
        lists = {name: table[name].to_pylist() for name in table.column_names}
        sizes = about["sources"] or {}
        rows = list(identities(lists))
        before = {name: Seen(content, sizes.get(name.source)) for name, content in rows}
        found = follow(before, self._names, changed=self._changed(about))
        if found.unmatched:
            raise DataError(
                f"{path} has {listed(found.unmatched, 3)} without the content of the rows, and the data has other rows "
                f"now, so its losses cannot be matched with them. {CURE}"
            )
        for what, some in (("have other content now", found.changed), ("are not in the data any more", found.gone)):
            if some:
                logger.warning("Rows of the ledger %s, and are left out of it: %s.", what, listed(some))
        if found.moved:
            logger.warning("Rows of the ledger have moved, and keep their losses: %d.", len(found.moved))
        given: dict[SampleId, int] = {}
        numbers = []
        for name, _ in rows:  # a row that comes several times has several samples of one name
            place = given.get(name, 0)
            given[name] = place + 1
            here = found.numbers.get(name, ())
            numbers.append(here[place] if place < len(here) else -1)
        return np.asarray(numbers, dtype=np.int64)

    def _numbers_of_older(self, table: pa.Table, about: JSONObject, path: Path) -> Array:
        """Returns the numbers of a ledger of version 0.2, which has places of rows only."""
        names = self._names
        sizes = about["sources"] or {source.name: about["num_samples"] for source in names.sources[:1]}
        logger.warning(
            "%s was written by version 0.2: its rows have places and no names. They are right if the data is the same.",
            path,
        )
        sources: Sequence[str] = table["source"].to_pylist()
        if about["sources"] is None:
            sources = [names.sources[0].name] * len(sources)
        changed = {name for name, size in sizes.items() if name in names.sizes and names.sizes[name] != size}
        if changed & set(sources) or (about["sources"] is None and len(names.sources) > 1):
            raise DataError(
                f"{path} was written by version 0.2 for {_sizes_text(sizes)}. The data is {_sizes_text(names.sizes)} "
                f"now, so its rows cannot be matched. {CURE}"
            )
        places = table["row"].to_pylist() if about["sources"] else table["sample"].to_pylist()
        found = [names.number_at(source, place) for source, place in zip(sources, places, strict=True)]
        return np.asarray([-1 if number is None else number for number in found], dtype=np.int64)


def _spread(num: int, most: int) -> Iterable[int]:
    """Returns at most `most` numbers below `num`, evenly spread, the last one among them."""
    return dict.fromkeys(np.linspace(0, num - 1, min(num, most)).astype(int).tolist()) if num else ()


def _sizes_text(sizes: Any) -> str:
    return ", ".join(f"{name!r} with {'no end' if size is None else f'{size} rows'}" for name, size in sizes.items())
