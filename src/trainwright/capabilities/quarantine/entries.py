"""Finds the samples of the quarantine file in the current training data, and describes samples for the file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from trainwright._types import DatasetLike, counted, is_count
from trainwright.capabilities.quarantine.file import QUARANTINE_NAME, Entry, Named, Quarantined, Sizes
from trainwright.data.identity import Followed, SampleId, Seen, follow, listed
from trainwright.data.row_names import RowNames, row_names
from trainwright.data.sample_filter import Sample
from trainwright.errors import DataError

CURE = (
    f"Delete their lines in {QUARANTINE_NAME} and add them again with trainer.quarantine, or name rows by a column "
    "that does not change: id_column='id'."
)


@dataclass(frozen=True, slots=True)
class Found:
    """Samples to exclude, their names, and notes about samples that have moved or changed."""

    samples: frozenset[Sample]
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_samples(quarantined: Quarantined, dataset: DatasetLike, names: RowNames) -> Found:
    """Returns the samples that the entries of the file currently refer to.

    Raises DataError for entries that cannot be matched to the data.
    """
    samples: set[Sample] = set()
    notes: list[str] = []
    numbers = [entry for entry in quarantined.entries if isinstance(entry, int)]
    if numbers and quarantined.sizes is not None and dict(quarantined.sizes) != names.sizes:
        raise DataError(
            f"{QUARANTINE_NAME} has sample numbers for {_described(quarantined.sizes)}. "
            f"The training data now has {_described(names.sizes)}, so they would exclude other rows. {CURE}"
        )
    samples.update(numbers)
    columns: dict[str, list[int | str]] = {}
    for entry in quarantined.entries:
        if isinstance(entry, tuple):
            columns.setdefault(entry[0], []).append(entry[1])
    for column, values in columns.items():
        samples.update(_match_column(dataset, column, values, notes))
    named = {entry.name: entry.seen for entry in quarantined.entries if isinstance(entry, Named)}
    found = follow(named, names)
    samples.update(number for numbers in found.numbers.values() for number in numbers)
    notes += describe_found(found)
    if found.unmatched:
        raise DataError(
            f"{QUARANTINE_NAME} names {listed(found.unmatched)} without the content of "
            f"{'the row' if len(found.unmatched) == 1 else 'the rows'}, but the rows of the data have changed. {CURE}"
        )
    shown = tuple(_text(sample, names) for sample in sorted(samples, key=str))
    return Found(frozenset(samples), shown, tuple(notes))


def _text(sample: Sample, names: RowNames) -> str:
    """Returns the name of a sample for a message; for a sample named by a column, the value."""
    return str(sample[1]) if isinstance(sample, tuple) else str(names.find_name(sample))


def describe_found(found: Followed) -> list[str]:
    """Returns notes about samples that have moved or changed."""
    notes = []
    moved = [f"{old} is {new}" for old, new in found.moved.items() if str(old) != str(new)]
    if moved:
        notes.append(f"Rows in quarantine have moved: {listed(moved)}.")
    if found.changed:
        notes.append(
            f"Rows in quarantine have changed, so they are trained on again: {listed(found.changed)}. "
            "Use trainer.quarantine to exclude the new rows."
        )
    if found.gone:
        notes.append(f"Rows in quarantine are no longer in the training data: {listed(found.gone)}.")
    return notes


def _described(sizes: Sizes) -> str:
    return ", ".join(
        f"{name!r}, a stream" if size is None else f"{name!r} with {counted(size, 'row')}"
        for name, size in sizes.items()
    )


def _match_column(dataset: DatasetLike, column: str, values: Iterable[int | str], notes: list[str]) -> Iterable[Sample]:
    """Returns the samples with given values of a column; in a stream, they are recognized when it is read."""
    if isinstance(dataset, IterableDataset):
        return [(column, value) for value in values]
    names = row_names(dataset, id_column=column)
    found: list[Sample] = []
    missing = []
    for value in values:
        numbers = names.find_numbers(SampleId("", 0, key=value))
        found += numbers
        if not numbers:
            missing.append(value)
    if missing:
        notes.append(f"Rows in quarantine are no longer in the training data: {listed(missing)} in {column!r}.")
    return found


def read_entries(
    samples: Iterable[Any], dataset: DatasetLike, names: RowNames, *, column: str | None
) -> dict[Entry, tuple[Sample, ...]]:
    """Returns the entries for the samples that a user named, with their samples, without duplicates.

    Raises DataError for a name that matches no sample of the dataset.
    """
    found: dict[Entry, tuple[Sample, ...]] = {}
    for sample in samples:
        if column is not None:
            if type(sample) not in (int, str):
                raise DataError(f"{sample!r} is not a value of the column {column!r}.")
            found[column, sample] = tuple(_match_column(dataset, column, [sample], []))
            continue
        for number in _find_numbers(sample, names):
            name = names.find_name(number)
            key = names.id_column
            if name.key is not None and key is not None:
                found[key, name.key] = (number,)
            else:
                seen = Seen(names.read_fingerprint(number), names.find_size(name))
                found[Named(name, seen)] = (number,)
    return found


def _find_numbers(sample: Any, names: RowNames) -> list[int]:
    if isinstance(sample, SampleId):
        return names.find(str(sample))
    if isinstance(sample, str):
        return names.find(sample)
    if is_count(sample):
        try:
            names.source_and_place(int(sample))
        except IndexError:
            pass
        else:
            return [int(sample)]
    num = len(names)
    has = f": the training dataset has {num}" if num else ""
    raise DataError(f"{sample!r} is not the index of a sample{has}.")
