"""Rows of a ledger: their names and fingerprints for its file, and their positions in the data when it is read.

Rows must be read for their fingerprints, unless the dataset has them available. That happens before each file is
written, largest losses first, within a share of the time since the previous file; at the end of a run it may take a
little longer. Some rows, spread over the data, are read for the first file; a resume compares them to see which sources
have changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from trainwright._types import JSONObject, counted
from trainwright.capabilities.ledger.table import (
    Array,
    Columns,
    as_table,
    columns_in,
    identities,
    identity_columns,
    read_table,
)
from trainwright.data.identity import SampleId, Seen, as_hex, follow, listed
from trainwright.data.row_names import NamesOf, RowNames
from trainwright.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

PROBES = 256  # rows over all sources that show whether the data has changed
PROBE_S = 0.25  # time for reading them
SHARE = 0.01  # share of the time since the last file that may be spent reading rows
LEAST_S = 0.02  # likewise
LEAST_AT_END_S = 2.0
Probes: TypeAlias = dict[str, dict[str, str | None]]  # source -> position of a row -> fingerprint
CURE = (
    "Name rows by a column that does not change (id_column='id'), or train on the earlier data. Without ledger.parquet "
    "in the checkpoint, the ledger begins with this run."
)


class LedgerRows:
    """Names and fingerprints of the samples of a ledger.

    Args:
        names: names of the samples of the training data.
    """

    def __init__(self, names: NamesOf) -> None:
        self._read_names = names
        self._since = time.monotonic()
        self._contents: dict[int, int | None] = {}  # contents of the rows read so far
        self._probes: Probes | None = None

    @property
    def _names(self) -> RowNames:
        return self._read_names()

    # -- writing -------------------------------------------------------------------------------------------------------

    def about(self) -> JSONObject:
        """Returns the metadata of a ledger about its data."""
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
        """Returns the fingerprint of the row at a position of a source, as text."""
        number = self._names.number_at(source, place)
        content = None if number is None else self._read_content(number)
        return None if content is None else as_hex(content)

    def _read_content(self, number: int) -> int | None:
        source, place = self._names.source_and_place(number)
        if source.keeps_contents:
            return source.read_content(place)
        if number not in self._contents:
            self._contents[number] = source.read_content(place)
        return self._contents[number]

    def read_contents(self, noted: Columns, *, is_end: bool) -> None:
        """Reads the rows of samples for their fingerprints, largest mean loss first, until the time is up."""
        now = time.monotonic()
        end = now + max(LEAST_AT_END_S if is_end else LEAST_S, SHARE * (now - self._since))
        self._since = now
        order = np.argsort(-np.nan_to_num(noted["mean_loss"], nan=-np.inf), kind="stable")
        for number in noted["sample"][order].tolist():
            if time.monotonic() > end:
                logger.info("The ledger has fingerprints of %s.", counted(len(self._contents), "row"))
                return
            self._read_content(number)

    def table(self, noted: Columns, about: JSONObject) -> pa.Table:
        """Returns the table of a ledger's file."""
        names = self._names
        samples = noted["sample"].tolist()
        contents = []
        for number in samples:
            source, place = names.source_and_place(number)
            contents.append(source.read_content(place) if source.keeps_contents else self._contents.get(number))
        return as_table(noted, identity_columns([names.find_name(number) for number in samples], contents), about)

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> Columns:
        """Reads the ledger of a checkpoint, with the current numbers of its samples.

        Rows that changed or vanished are dropped, with a warning. Raises DataError if the file is not a ledger, or
        rows cannot be matched with the data.
        """
        table, about = read_table(path)
        columns = columns_in(table, path)
        if self._is_same_data(table, about):
            return columns
        numbers = self._followed(table, about, path)
        kept = numbers >= 0
        found = {name: column[kept] for name, column in columns.items()}
        return {**found, "sample": numbers[kept]}

    def is_same(self, about: JSONObject) -> bool:
        """Returns whether the data is unchanged, judged by its size and by some of its rows."""
        sizes = about["sources"]
        return list(sizes.items()) == list(self._names.sizes.items()) and not self._changed(about)

    def _changed(self, about: JSONObject) -> set[str]:
        """Returns the sources in which a row read earlier is now different."""
        probes: Probes = about["probes"]
        return {
            source
            for source, rows in probes.items()
            if any(self._text_at(source, int(place)) != content for place, content in rows.items())
        }

    def _is_same_data(self, table: pa.Table, about: JSONObject) -> bool:
        """Returns whether all samples have the same names and, as far as available, the same contents as before."""
        if not self.is_same(about):
            return False
        names = self._names
        lists = {name: table[name].to_pylist() for name in table.column_names}
        end = time.monotonic() + PROBE_S
        for number, (name, content) in zip(lists["sample"], identities(lists), strict=True):
            source, place = names.source_and_place(number)
            if source.find_name(place) != name:
                return False
            is_compared = content is not None and (source.keeps_contents or time.monotonic() < end)
            if is_compared and self._read_content(number) != content:
                return False
        return True

    def _followed(self, table: pa.Table, about: JSONObject, path: Path) -> Array:
        """Returns the current number of each sample; -1 for samples that no longer exist."""
        lists = {name: table[name].to_pylist() for name in table.column_names}
        sizes = about["sources"]
        rows = list(identities(lists))
        before = {name: Seen(content, sizes.get(name.source)) for name, content in rows}
        found = follow(before, self._names, changed=self._changed(about))
        if found.unmatched:
            raise DataError(
                f"{path} has {listed(found.unmatched, 3)} without the content of the rows, but the rows of the data "
                f"have changed, so its losses cannot be matched with them. {CURE}"
            )
        for what, some in (("have other content now", found.changed), ("are no longer in the data", found.gone)):
            if some:
                logger.warning("Rows of the ledger %s, and are dropped from it: %s.", what, listed(some))
        if found.moved:
            logger.warning("%d rows of the ledger have moved; they keep their losses.", len(found.moved))
        given: dict[SampleId, int] = {}
        numbers = []
        for name, _ in rows:  # a repeated row has several samples of the same name
            place = given.get(name, 0)
            given[name] = place + 1
            here = found.numbers.get(name, ())
            numbers.append(here[place] if place < len(here) else -1)
        return np.asarray(numbers, dtype=np.int64)


def _spread(num: int, most: int) -> Iterable[int]:
    """Returns at most `most` numbers below `num`, evenly spread and including the last."""
    return dict.fromkeys(np.linspace(0, num - 1, min(num, most)).astype(int).tolist()) if num else ()
