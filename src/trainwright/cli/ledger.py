"""Questions about the ledger of a run: samples with the largest losses, without a visit, with several; and two runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainwright._types import RECIPE_NAME, JSONObject, counted
from trainwright.capabilities.ledger.table import LEDGER_NAME, identities, read_table
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.store import CheckpointStore
from trainwright.data.identity import SampleId, Seen, fingerprint, follow, listed
from trainwright.errors import ArgumentError, DataError, did_you_mean

QUESTIONS = ("top", "never", "repeated", "by-source", "text")
NOT_SHOWN = ("sample", "row", "fingerprint")  # columns not shown on the terminal, since the name contains them
VALUES = ("visits", "tokens", "mean_loss", "last_loss", "last_step")
LONGEST = 60  # characters of a text in a table


@dataclass(frozen=True)
class LedgerTable:
    """A ledger's file: columns of the samples with visits, and a description of its data."""

    columns: Mapping[str, Sequence[Any]]
    names: Sequence[SampleId]
    fingerprints: Sequence[int | None]  # fingerprints of their rows
    sizes: Mapping[str, int | None]  # samples of each source
    num_samples: int | None  # None for a stream
    id_column: str | None

    @classmethod
    def read(cls, run: Path) -> LedgerTable:
        """Reads the ledger of a run; raises DataError if there is none."""
        path = ledger_file(run)
        table, about = read_table(path)
        columns = {name: table[name].to_pylist() for name in table.column_names}
        try:
            found = list(identities(columns))
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(f"{path} is not the ledger of a run: {error}.") from error
        return cls(
            columns,
            [name for name, _ in found],
            [content for _, content in found],
            about["sources"],
            about["num_samples"],
            about.get("id_column"),
        )

    def row(self, place: int) -> JSONObject:
        """Returns a row of the table for people and programs."""
        name = self.names[place]
        found: JSONObject = {
            "name": str(name),
            "sample": self.columns["sample"][place],
            "source": name.source,
            "row": name.row,
        }
        if self.fingerprints[place] is not None:
            found["fingerprint"] = self.columns["fingerprint"][place]
        return found | {value: self.columns[value][place] for value in VALUES}

    # Names of the samples for `follow`, by their rows in the table.

    def find_name(self, number: int) -> SampleId:
        return self.names[number]

    def find_numbers(self, name: SampleId) -> Sequence[int]:
        number = self._places.get(name.place)
        return () if number is None else (number,)

    def read_fingerprint(self, number: int) -> int | None:
        return self.fingerprints[number]

    def contents(self) -> Iterable[tuple[int, int | None]]:
        return enumerate(self.fingerprints)

    def find_size(self, name: SampleId) -> int | None:
        return self.sizes.get(name.source)

    @cached_property
    def _places(self) -> dict[object, int]:
        return {name.place: place for place, name in reversed(list(enumerate(self.names)))}


def answer(run: Path, question: str, *, number: int, data: Path | None) -> list[JSONObject]:
    """Returns rows of a run's ledger, at most `number` of them, with their text if `data` or the recipe has it.

    top: largest mean loss first. never: no visit. repeated: more visits than the sample with the fewest, most first.
    by-source: one row for each source. text: in the order of the data. Raises ArgumentError for another question, and
    DataError if there is no ledger.
    """
    if question not in QUESTIONS:
        raise ArgumentError(f"{question!r} is not one of: {', '.join(QUESTIONS)}.{did_you_mean(question, QUESTIONS)}")
    table = LedgerTable.read(run)
    if question == "by-source":
        return [_describe_source(name, table.columns) for name in dict.fromkeys(table.columns["source"])]
    texts = Texts.from_run(run, data, table)
    if question == "never":
        rows = []
        for sample in _never(table, number):
            text = {"text": texts.by_number(sample)} if texts.has_numbers else {}
            rows.append({"name": texts.find_name(sample), "sample": sample, **text})
        return rows
    places = list(islice(_chosen(question, table), number))
    if not texts.rows:
        return [table.row(place) for place in places]
    return [{**table.row(place), "text": texts.at(place)} for place in places]


def ledger_file(run: Path) -> Path:
    """Returns the ledger of an output directory, of its newest checkpoint, or of a checkpoint; or the file itself."""
    if run.is_file():
        return run
    store = CheckpointStore(run)
    newest = [store.path(step) for step in store.steps()[-1:]]
    for folder in (run, *newest):
        path = Checkpoint(folder).entry("ledger").path
        if path is not None:
            return path
    raise DataError(f"{run} has no {LEDGER_NAME}; train with ledger=True.")


def _chosen(question: str, table: LedgerTable) -> Sequence[int]:
    visits = np.asarray(table.columns["visits"])
    loss = np.asarray(table.columns["mean_loss"], dtype=float)
    if question == "top":
        return [place for place in np.argsort(-loss, kind="stable").tolist() if not np.isnan(loss[place])]
    if question == "repeated":
        order = np.argsort(-visits, kind="stable")
        return order[visits[order] > visits.min(initial=1)].tolist()  # type: ignore[no-any-return]
    return range(len(visits))


def _never(table: LedgerTable, number: int) -> list[int]:
    if table.num_samples is None:
        raise DataError("The ledger is for a stream without a length, so its unseen samples are unknown.")
    seen = set(table.columns["sample"])
    return list(islice((sample for sample in range(table.num_samples) if sample not in seen), number))


def _describe_source(name: str, columns: Mapping[str, Sequence[Any]]) -> JSONObject:
    part = [place for place, source in enumerate(columns["source"]) if source == name]
    tokens = sum(columns["tokens"][place] for place in part)
    return {
        "source": name,
        "samples": len(part),
        "visits": sum(columns["visits"][place] for place in part),
        "tokens": tokens,
        "mean_loss": sum(columns["loss_sum"][place] for place in part) / tokens if tokens else None,
    }


@dataclass(frozen=True)
class Texts:
    """Rows with the texts of samples.

    Attributes:
        table: the ledger.
        rows: rows of a file, or of a run's own data; empty if there are none.
        has_numbers: row n is the row of sample n.
        has_indices: row n is the row with that index before rows were held out.
    """

    table: LedgerTable
    rows: Sequence[Any] = ()
    has_numbers: bool = False
    has_indices: bool = False

    @classmethod
    def from_run(cls, run: Path, data: Path | None, table: LedgerTable) -> Texts:
        """Finds the rows: in a named file, or in the data of the run's recipe.

        Raises DataError for a file without any of the ledger's rows.
        """
        from trainwright.cli.tasks import recipe_run, source

        if data is not None:
            from trainwright.cli.recipe.schema import DataPart

            texts = cls._fitting(list(source.read_rows(data, DataPart())), table)
            if len(table.names) and not any(texts.at(place) for place in range(len(table.names))):
                raise DataError(
                    f"The ledger has {counted(table.num_samples or 0, 'sample')}, but none of the "
                    f"{counted(len(texts.rows), 'row')} of {data} is among them. Name the file that was trained on."
                )
            return texts
        if not (run / RECIPE_NAME).is_file():
            return cls(table)
        material = source.load(*recipe_run.read_run(run, ()))
        if not material.recipe.data.sources:
            return cls._fitting(material.train, table)
        return cls._fitting([row for rows in material.by_source().values() for row in rows], table)

    @classmethod
    def _fitting(cls, rows: Sequence[Any], table: LedgerTable) -> Texts:
        names_files = any(name.file is not None for name in table.names)
        largest = max((name.row for name in table.names), default=0)
        is_split = not names_files and len(table.sizes) == 1 and largest < len(rows) and len(rows) != table.num_samples
        return cls(
            table,
            rows,
            has_numbers=table.num_samples in (None, len(rows)),
            has_indices=is_split and len(rows) > (table.num_samples or 0),
        )

    def at(self, place: int) -> str | None:
        """Returns the text of a row of the ledger; None if the data does not have it."""
        name = self.table.names[place]
        content = self.table.fingerprints[place]
        row = self._by_name.get(replace(name, part=None).place)
        if content is not None and (row is None or fingerprint(row) != content):
            row = self._by_content.get(content)
        if row is None and name.file is None:
            if self.has_numbers:
                return self.by_number(self.table.columns["sample"][place])
            row = self.rows[name.row] if self.has_indices else None
        return None if row is None else _text(row)

    def by_number(self, sample: int) -> str:
        """Returns the text of a sample by its number."""
        return _text(self.rows[sample])

    def find_name(self, sample: int) -> str:
        """Returns the name of a sample without a visit, which the ledger does not have."""
        name = getattr(self.rows[sample], "name", None) if self.has_numbers and self.rows else None
        if name is not None:
            return str(name)
        is_plain = len(self.table.sizes) == 1
        names = zip(self.table.names, self.table.columns["sample"], strict=True)
        if is_plain and all(one.row == number and one.file is None and one.key is None for one, number in names):
            return str(SampleId(next(iter(self.table.sizes)), sample))
        return f"sample {sample}"

    @cached_property
    def _by_name(self) -> dict[object, Any]:
        return {row.name.place: row for row in self.rows if isinstance(getattr(row, "name", None), SampleId)}

    @cached_property
    def _by_content(self) -> dict[int, Any]:
        return {fingerprint(row): row for row in self.rows}


def _text(row: Any) -> str:
    texts = [value for value in row.values() if isinstance(value, str)]
    return " | ".join(texts) if texts else json.dumps(row, default=str, ensure_ascii=False)


def exclude(run: Path, folder: Path, found: Sequence[JSONObject]) -> None:
    """Adds listed samples to the quarantine of a directory, by their names."""
    from trainwright.capabilities.quarantine.file import Entry, Named, add_to_quarantine, note_sizes

    table = LedgerTable.read(run)
    place_of = {sample: place for place, sample in enumerate(table.columns["sample"])}
    entries: list[Entry] = []
    for one in found:
        place = place_of.get(one["sample"])
        if place is None:  # never seen in training, so the ledger has no name of it
            entries.append(int(one["sample"]))
            continue
        name = table.names[place]
        if name.key is not None and table.id_column is not None:
            entries.append((table.id_column, name.key))
        else:
            entries.append(Named(name, Seen(table.fingerprints[place], table.find_size(name))))
    add_to_quarantine(folder, entries)
    if any(isinstance(entry, int) for entry in entries):
        note_sizes(folder, table.sizes)


def difference(first: Path, second: Path, *, number: int) -> JSONObject:
    """Compares the ledgers of two runs row by row, matching rows across changes of the data.

    Returns:
        `rows`: at most `number` rows with mean loss and visits in both, largest change first. `only_first`,
        `only_second`: names of rows in one run only. `changed`: rows with different content in the second run.

    Raises:
        DataError: a ledger is missing, or rows cannot be matched.
    """
    one = LedgerTable.read(first)
    two = LedgerTable.read(second)
    before = {name: Seen(one.fingerprints[place], one.find_size(name)) for place, name in enumerate(one.names)}
    found = follow(before, two)
    if found.unmatched:
        raise DataError(
            f"{first} has {counted(len(found.unmatched), 'row')} without fingerprints, but the data of {second} has "
            "a different number of rows, so they cannot be matched. Train both with id_column='id'."
        )
    rows = []
    for place, name in enumerate(one.names):
        for there in found.numbers.get(name, ()):
            losses = one.columns["mean_loss"][place], two.columns["mean_loss"][there]
            row: JSONObject = {"name": str(name)}
            if name in found.moved:
                row["name_second"] = str(found.moved[name])
            row |= {"mean_loss_first": losses[0], "mean_loss_second": losses[1], "change": losses[1] - losses[0]}
            row |= {"visits_first": one.columns["visits"][place], "visits_second": two.columns["visits"][there]}
            rows.append(row)
    rows.sort(key=lambda row: 1.0 if math.isnan(row["change"]) else -abs(row["change"]))  # rows without a loss last
    matched = {there for numbers in found.numbers.values() for there in numbers}
    changed = {there for name in found.changed for there in two.find_numbers(name)}
    return {
        "rows": rows[:number],
        "num_matched": len(rows),
        "changed": [str(name) for name in found.changed],
        "only_first": [str(name) for name in found.gone],
        "only_second": [
            str(name) for place, name in enumerate(two.names) if place not in matched and place not in changed
        ],
    }


def difference_lines(found: JSONObject) -> list[str]:
    """Returns a comparison as lines for the terminal."""
    shown = [f"{counted(found['num_matched'], 'row')} in both."]
    texts = {
        "changed": "with other content",
        "only_first": "only in the first run",
        "only_second": "only in the second run",
    }
    for name, text in texts.items():
        if found[name]:
            shown.append(f"{counted(len(found[name]), 'row')} {text}: {listed(found[name], 5)}")
    return [*lines(found["rows"]), *shown] if found["rows"] else shown


def lines(found: Sequence[JSONObject]) -> list[str]:
    """Returns the rows as a table for the terminal."""
    if not found:
        return ["No sample."]
    names = list(dict.fromkeys(name for one in found for name in one if name not in NOT_SHOWN))
    cells = [names, *([_cell(one.get(name, "")) for name in names] for one in found)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(names))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."
