"""Findings in the rows of a recipe, with row numbers and the cure: errors before training, and notes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainwright.cli.recipe.schema import Recipe
from trainwright.cli.tasks.conversations import ConversationError, Shape, is_conversation

Column = Callable[[str], Iterable[object]]  # name of a column -> its cells, in the order of the rows
TEXTS = ("text", "text_pair", "source", "target")
MOST = 5  # rows, or labels, that a line names
MOST_LABELS = 1000  # with more of them, a column has numbers or texts


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem in the rows, and the entry of the recipe that it belongs to."""

    path: tuple[str, ...]
    text: str
    is_error: bool = False


def rows_named(numbers: Sequence[int]) -> str:
    """Names rows by their numbers, counted from 1 without a header: `rows 3, 17, 30, ... (12)`."""
    shown = ", ".join(map(str, numbers[:MOST]))
    return f"row{'s' * (len(numbers) > 1)} {shown}" + (f", ... ({len(numbers)})" if len(numbers) > MOST else "")


def find(recipe: Recipe, part: str, column: Column, numbers: Sequence[int]) -> Iterator[Finding]:
    """Yields what is odd in the rows of a part.

    Args:
        recipe: says which columns have which roles.
        part: `train` or `eval`, for the messages.
        column: returns the cells of a column, of all rows.
        numbers: of the rows that are used, from 1.
    """
    used = set(numbers)

    def cells(role: str) -> Iterator[tuple[int, object]]:
        return (one for one in enumerate(column(recipe.column(role)), start=1) if one[0] in used)

    for role in (*recipe.spec.needs, *recipe.spec.takes):
        if role in TEXTS and (role in recipe.spec.needs or role in recipe.data.columns):
            yield from _of_texts(recipe, part, role, cells(role))
    label = next((role for role in ("label", "tags") if role in recipe.spec.needs), None)
    if label is not None:
        yield from _of_labels(recipe, part, label, cells(label))


def _of_texts(recipe: Recipe, part: str, role: str, cells: Iterable[tuple[int, object]]) -> Iterator[Finding]:
    path = ("data", "columns", role)
    empty = []
    for number, cell in cells:
        if isinstance(cell, (list, tuple, dict)):
            is_chat = is_conversation(cell)
            cure = "this looks like chat data: set task: chat." if is_chat else "name a column of text, or join it."
            text = f"row {number} of {part} holds a {type(cell).__name__} in the column {recipe.column(role)!r}; {cure}"
            return (yield Finding(path=path, text=text, is_error=True))
        if cell is None or not str(cell).strip():
            empty.append(number)
    if empty:
        what = "1 row has" if len(empty) == 1 else f"{len(empty)} rows have"
        text = f"{what} no {role} in {part}: {rows_named(empty)}. Take them out, or fill them in."
        yield Finding(path=path, text=text)


def _of_labels(recipe: Recipe, part: str, role: str, cells: Iterable[tuple[int, object]]) -> Iterator[Finding]:
    missing: list[int] = []
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    for number, cell in cells:
        if cell is None or cell == "":
            missing.append(number)
        elif role == "label":
            rows_of[str(cell)].append(number)
    if missing:
        which = f"{rows_named(missing)}. Fill them in, or take them out."
        text = f"{len(missing)} of the {part} rows {'has' if len(missing) == 1 else 'have'} no label: {which}"
        yield Finding(path=("data", "columns", role), text=text, is_error=True)
    if "labels" not in recipe.spec.only or len(rows_of) > MOST_LABELS:
        return
    named = recipe.data.labels if isinstance(recipe.data.labels, dict) else {}
    renamed = {str(value): str(name) for value, name in named.items()}
    yield from _alike(rows_of, renamed)
    single = [(label, rows[0]) for label, rows in rows_of.items() if len(rows) == 1]
    if part == "train" and single:
        shown = ", ".join(f"{label!r} (row {row})" for label, row in single[:MOST])
        more = f", ... ({len(single)})" if len(single) > MOST else ""
        text = f"labels with a single row: {shown}{more}. One row is trained or evaluated, never both: add rows, or "
        yield Finding(path=("data", "columns", role), text=f"{text}leave them out by data.where.")


def _alike(rows_of: Mapping[str, Sequence[int]], renamed: Mapping[str, str]) -> Iterator[Finding]:
    """Yields labels that only case or blanks tell apart, and that the recipe does not give one name."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for label in rows_of:
        groups[" ".join(label.split()).casefold()].append(label)
    for labels in groups.values():
        if len({renamed.get(label, label) for label in labels}) > 1:
            common = max(labels, key=lambda label: len(rows_of[label])).strip()
            shown = ", ".join(f"{label!r} ({rows_named(rows_of[label])})" for label in labels)
            pairs = ", ".join(f'"{label}": {common}' for label in labels)
            text = f"labels that differ only by case or blanks: {shown}. To make them one, list all: {{{pairs}, ...}}."
            yield Finding(path=("data", "labels"), text=text)


def of_conversations(
    shape: Shape, part: str, rows: Iterable[Mapping[str, object]], numbers: Sequence[int]
) -> tuple[list[int], Iterator[Finding]]:
    """Returns the numbers of the rows that are conversations, and the problems of the others."""
    used = set(numbers)
    wrong = defaultdict[str, list[int]](list)
    for number, row in enumerate(rows, start=1):
        if number in used:
            try:
                shape.messages(row)
            except ConversationError as error:
                wrong[str(error)].append(number)
    bad = {number for rows_of in wrong.values() for number in rows_of}
    good = [number for number in numbers if number not in bad]
    path = ("data", "columns", next(iter(shape.columns)))

    def found() -> Iterator[Finding]:
        for problem, of in wrong.items():
            yield Finding(path=path, text=f"left out of {part}: {rows_named(of)}: {problem}.", is_error=not good)

    return good, found()
