"""Checks of tables, before their rows are encoded: variants of a label, and traces of how a file was made.

The command line checks the rows of its files, a check-up the texts of a dataset.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from trainwright.preflight.check_registry import check_tables
from trainwright.preflight.tables import Table
from trainwright.support.findings import Finding, warning

MOST_LABELS = 1000  # a column with more labels has numbers or texts
RARE = 20  # a label may be a misspelling of another label with this multiple of its rows
LEAST_LETTERS = 4  # shorter labels may differ by one letter without being misspelled
MOST_NAMES = 5  # columns that a finding names
DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+,\d+\s*")


@check_tables(about="labels that differ by their form: number, case, blanks, one letter")
def label_forms(table: Table) -> Iterator[Finding]:
    if table.label is None:
        return
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    for place, cell in enumerate(table.columns[table.label]()):
        if isinstance(cell, (str, int, float)) and cell != "":
            rows_of[str(cell)].append(place)
    if len(rows_of) > MOST_LABELS:
        return
    alike: list[tuple[str, list[str]]] = []
    for how, form in (("by case or blanks", _folded), ("as texts, and are one number", _number)):
        alike += [(how, labels) for labels in _grouped(rows_of, form)]
    alike += [("by one letter", [meant, slip]) for slip, meant in _slips(rows_of)]
    alike = [(how, labels) for how, labels in alike if len({table.renamed.get(one, one) for one in labels}) > 1]
    cure = "Write them the same way, or map them to one number."
    is_in_file = bool(table.entries)
    if is_in_file and alike:
        block = json.dumps(_joined(table, [labels for _, labels in alike], rows_of), ensure_ascii=False)
        cure = f"To make them one, put into data: `labels: {block}`."
    for how, labels in alike:
        shown = ", ".join(f"{label!r} ({table.listed(rows_of[label])})" for label in labels)
        rare = min(labels, key=lambda label: len(rows_of[label]))
        found = warning(f"labels that differ only {how}: {shown}.", cure, rows=table.names(rows_of[rare]))
        yield replace(found, entry="data.labels" if is_in_file else "")


def _joined(table: Table, groups: Sequence[Sequence[str]], rows_of: Mapping[str, list[int]]) -> dict[str, str | None]:
    """Returns the mapping that gives the labels of each group one name, with what is mapped already."""
    mapping = dict(table.renamed)
    for labels in groups:
        common = max(labels, key=lambda label: len(rows_of[label])).strip()
        mapping |= {label: common for label in labels if label != common}
    for label, name in mapping.items():
        # A name that is itself given another one, as a misspelling in capitals.
        mapping[label] = mapping.get(name, name) if name is not None else None
    return mapping


def _grouped(labels: Iterable[str], form: Callable[[str], Hashable]) -> list[list[str]]:
    """Returns groups of labels with the same form."""
    groups: defaultdict[Hashable, list[str]] = defaultdict(list)
    for label in labels:
        found = form(label)
        if found is not None:
            groups[found].append(label)
    return [group for group in groups.values() if len(group) > 1]


def _folded(label: str) -> str:
    return " ".join(label.split()).casefold()


def _number(label: str) -> float | None:
    """Returns the number that a label is, None for a word; variants by blanks are found as texts."""
    if label != label.strip() or "_" in label:
        return None
    try:
        number = float(label)
    except ValueError:
        return None
    return number if number == number else None


def _slips(rows_of: dict[str, list[int]]) -> Iterator[tuple[str, str]]:
    """Yields rare labels with the frequent label that differs by one letter: omitted, added, changed or swapped."""
    long_ones = {label: len(rows) for label, rows in rows_of.items() if len(label) >= LEAST_LETTERS}
    near: defaultdict[str, list[str]] = defaultdict(list)
    for label in long_ones:
        for at in range(len(label)):
            near[label[:at] + label[at + 1 :]].append(label)
        near[label].append(label)
    seen: set[str] = set()
    for labels in near.values():
        meant = max(labels, key=long_ones.__getitem__)
        for slip in labels:
            if slip not in seen and long_ones[slip] * RARE <= long_ones[meant] and _is_slip(slip, meant):
                seen.add(slip)
                yield slip, meant


def _is_slip(slip: str, meant: str) -> bool:
    """Returns whether two words differ by one letter; `B-LOC` and `I-LOC`, or `day 1` and `day 2`, do not count."""
    start = _num_common(slip, meant)
    end = _num_common(slip[start:][::-1], meant[start:][::-1])
    changed = [slip[start : len(slip) - end], meant[start : len(meant) - end]]
    if not "".join(changed).isalpha() or _folded(slip) == _folded(meant):
        return False
    is_swap = len(changed[0]) == 2 and changed[0] == changed[1][::-1]
    is_prefix = start == 0 and (slip[1:2] in "-_" or meant[1:2] in "-_")
    return (is_swap or max(map(len, changed)) == 1) and not is_prefix


def _num_common(one: str, other: str) -> int:
    """Returns the number of letters in the common prefix of two words."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@check_tables(about="the names of the columns again among the rows, as where files were joined")
def repeated_header(table: Table) -> Iterator[Finding]:
    if len(table.columns) < 2:  # a word may well be the name of its column
        return
    names = list(table.columns)
    first = table.columns[names[0]]()
    places = [place for place, cell in enumerate(first) if isinstance(cell, str) and cell.strip() == names[0]]
    for name in names[1:] if places else ():
        cells = table.columns[name]()
        places = [place for place in places if isinstance(cell := cells[place], str) and cell.strip() == name]
    if places:
        repeat = "row of it repeats" if len(places) == 1 else "rows of it repeat"
        adds = f" It adds {table.label!r} to the labels." if table.label is not None else ""
        found = Finding(
            "error" if table.label is not None else "warning",
            f"{len(places)} {repeat} the names of the columns in {table.part}: "
            f"{table.listed(places)} ({', '.join(map(repr, names[:MOST_NAMES]))}).{adds}",
            "Remove such lines: they remain where files were joined.",
            rows=table.names(places),
        )
        yield replace(found, entry=table.entry(table.label) or "data")


@check_tables(when="file", about="a column name that comes twice in the first line of a file")
def column_twice(table: Table) -> Iterator[Finding]:
    of_file: defaultdict[str, list[str]] = defaultdict(list)
    for file, name in table.twice:
        of_file[file].append(name)
    for file, names in of_file.items():
        is_used = any(name in table.used for name in names)
        which = "column" if len(names) == 1 else "columns"
        found = Finding(
            "error" if is_used else "warning",
            f"the first line of {file} has the {which} {', '.join(map(repr, names))} twice, and only the last is read.",
            "Give each column its own name.",
        )
        used = next((name for name in names if name in table.used), None)
        yield replace(found, entry=table.entry(used) or "data")


@check_tables(about="decimal commas in columns of numbers")
def decimal_commas(table: Table) -> Iterator[Finding]:
    for name in table.numbers:
        cells = table.columns[name]()
        places = [place for place, cell in enumerate(cells) if isinstance(cell, str) and DECIMAL_COMMA.fullmatch(cell)]
        if places:
            have = "row has a decimal comma" if len(places) == 1 else "rows have decimal commas"
            found = Finding(
                "error",
                f"{len(places)} {have} in the column {name!r} of {table.part}: {table.listed(places, cells=cells)}.",
                "Write 3.5 for 3,5: export the table again in English format, or replace the commas.",
                rows=table.names(places),
            )
            yield replace(found, entry=table.entry(name))
