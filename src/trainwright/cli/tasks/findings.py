"""Findings in the rows of a recipe, before they are encoded. Each names rows as the user knows them, with advice.

Checks that need no recipe are in `preflight/table_checks.py`; both yield findings of the check-up's type.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from trainwright.cli.recipe.schema import Recipe
from trainwright.cli.tasks.conversations import ConversationError, Shape, is_conversation
from trainwright.preflight.check_registry import look_at_table
from trainwright.preflight.row_checks import rows_in_both
from trainwright.preflight.rows import Rows
from trainwright.preflight.table_checks import MOST_LABELS
from trainwright.preflight.tables import MOST_LISTED, Table
from trainwright.support.findings import Finding

TEXTS = ("text", "text_pair", "source", "target")
ANSWERS = ("label", "tags", "target", "answer", "answers")  # roles of the values that a model predicts
FAR = 2  # a text is reported if its length exceeds the tokens read by this factor
ENTRY = "data.columns"


def described(finding: Finding) -> str:
    """Returns a finding as a line, with its entry of the recipe."""
    return f"{finding.entry}: {finding.evidence}" + (f" {finding.cure}" if finding.cure else "")


def make_table(
    recipe: Recipe,
    part: str,
    columns: Mapping[str, Callable[[], Sequence[object]]],
    *,
    find_name: Callable[[int], str],
    twice: Iterable[tuple[str, str]] = (),
    has_lists: bool = False,
) -> Table:
    """Returns the rows of a part, `train` or `eval`, with the recipe's description of their columns.

    Args:
        recipe: maps roles to columns.
        part: for messages.
        columns: cells of each column, read on demand.
        find_name: returns the name of a row by its position.
        twice: file and name of duplicate columns.
        has_lists: whether a row may have several labels.
    """
    named = recipe.data.labels if isinstance(recipe.data.labels, dict) else {}
    roles = [role for role in (*recipe.spec.needs, *recipe.spec.takes) if recipe.column(role) in columns]
    has_label = "label" in roles
    has_classes = has_label and "labels" in recipe.spec.only
    return Table(
        part=part,
        columns=columns,
        find_name=find_name,
        label=recipe.column("label") if has_classes and not has_lists else None,
        numbers=(recipe.column("label"),) if has_label and not has_classes else (),
        used=tuple(recipe.column(role) for role in roles),
        twice=tuple(twice),
        renamed={str(value): None if name is None else str(name) for value, name in named.items()},
        entries={recipe.column(role): f"{ENTRY}.{role}" for role in roles},
    )


def find(recipe: Recipe, table: Table) -> Iterator[Finding]:
    """Yields findings in the rows of a part."""
    for role in (*recipe.spec.needs, *recipe.spec.takes):
        if role in TEXTS and (role in recipe.spec.needs or role in recipe.data.columns):
            yield from _check_texts(recipe, table, role)
    label = next((role for role in ("label", "tags") if role in recipe.spec.needs), None)
    if label is not None:
        yield from _check_labels(recipe, table, label)
    yield from look_at_table(table)


def _check_texts(recipe: Recipe, table: Table, role: str) -> Iterator[Finding]:
    entry = f"{ENTRY}.{role}"
    column = recipe.column(role)
    cells = table.columns[column]()
    empty = []
    for place, cell in enumerate(cells):
        if isinstance(cell, (list, tuple, dict)):
            is_chat = is_conversation(cell)
            yield Finding(
                "error",
                f"{table.find_name(place)} of {table.part} holds a {type(cell).__name__} in the column {column!r}.",
                "This looks like chat data: set task: chat." if is_chat else "Name a column of text, or join it.",
                check="texts",
                rows=table.names([place]),
                entry=entry,
            )
            return
        if cell is None or not str(cell).strip():
            empty.append(place)
    named = recipe.data.map
    if empty and len(empty) == len(cells):
        yield Finding(
            "error",
            f"no row of {table.part} has a {role}: the column {column!r} is empty.",
            "Name the column with the texts." if named is None else f"Look at the rows that {named} returns.",
            check="texts",
            rows=table.names(empty[:1]),
            entry=entry,
        )
    elif empty:
        what = "1 row has" if len(empty) == 1 else f"{len(empty)} rows have"
        yield Finding(
            "warning",
            f"{what} no {role} in {table.part}: {table.listed(empty, cells=cells)}.",
            "Remove them, or fill them in.",
            check="texts",
            rows=table.names(empty),
            entry=entry,
        )


def _check_labels(recipe: Recipe, table: Table, role: str) -> Iterator[Finding]:
    entry = f"{ENTRY}.{role}"
    missing: list[int] = []
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    for place, cell in enumerate(table.columns[recipe.column(role)]()):
        if cell is None or cell == "":
            missing.append(place)
        elif role == "label":
            rows_of[str(cell)].append(place)
    if missing:
        text = next((recipe.column(one) for one in TEXTS if one in recipe.spec.needs), None)
        texts = None if text is None else table.columns[text]()
        yield Finding(
            "error",
            f"{len(missing)} of the {table.part} rows {'has' if len(missing) == 1 else 'have'} no label: "
            f"{table.listed(missing, cells=texts)}.",
            "Fill them in, or remove them.",
            check="missing_labels",
            rows=table.names(missing),
            entry=entry,
        )
    single = [label for label, places in rows_of.items() if len(places) == 1]
    if table.part == "train" and single and table.label is not None and len(rows_of) <= MOST_LABELS:
        shown = ", ".join(f"{label!r} ({table.find_name(rows_of[label][0])})" for label in single[:MOST_LISTED])
        more = f", ... ({len(single)})" if len(single) > MOST_LISTED else ""
        yield Finding(
            "warning",
            f"labels with a single row: {shown}{more}. One row is trained or evaluated, never both.",
            "Add rows, or exclude them with data.where.",
            check="single_labels",
            rows=table.names([rows_of[label][0] for label in single]),
            entry=entry,
        )


def cut_texts(table: Table, column: str, *, length: int, is_wanted: bool) -> Iterator[Finding]:
    """Yields the rows of which less than half is read, given that a word is at least one token.

    Args:
        table: table with the rows.
        column: column of texts, or lists of words.
        length: number of tokens that are read.
        is_wanted: whether the user set this length.
    """
    cells = table.columns[column]()
    words: dict[int, int] = {}
    for place, cell in enumerate(cells):
        # A word and the following blank are at least two characters.
        if isinstance(cell, str) and len(cell) > 2 * FAR * length:
            words[place] = len(cell.split())
        elif isinstance(cell, (list, tuple)):
            words[place] = len(cell)
    places = sorted((place for place, num in words.items() if num > FAR * length), key=lambda place: -words[place])
    if places:
        have = "1 row of it has" if len(places) == 1 else f"{len(places)} rows of it have"
        yield Finding(
            "note" if is_wanted else "warning",
            f"{length} tokens are read of a text of {table.part}, and {have} more than {FAR * length} words, up to "
            f"{words[places[0]]}: {table.listed(places, cells=cells)}. The rest is cut off.",
            "Split such texts into several rows, or let them begin with the part that matters.",
            check="cut_texts",
            rows=table.names(places),
            entry="data.max_length",
        )


def held_out(train: Rows, rows: Rows, columns: Sequence[str]) -> Iterator[Finding]:
    """Yields a finding if evaluation rows are among the training rows, by the columns that a model reads."""
    names = [name for name in columns if name in train.names and name in rows.names]
    for finding in rows_in_both(train, rows, names, part="eval"):
        yield replace(finding, check="held_out", entry="data.eval")


def check_conversations(shape: Shape, table: Table) -> tuple[list[int], Iterator[Finding]]:
    """Returns the positions of the rows that are conversations, and the problems of the others."""
    names = list(shape.columns.values())
    wrong = defaultdict[str, list[int]](list)
    good: list[int] = []
    for place, cells in enumerate(zip(*(table.columns[name]() for name in names), strict=True)):
        try:
            shape.messages(dict(zip(names, cells, strict=True)))
        except ConversationError as error:
            wrong[str(error)].append(place)
        else:
            good.append(place)

    def found() -> Iterator[Finding]:
        first = table.columns[names[0]]() if wrong else []
        for problem, of in wrong.items():
            yield Finding(
                "warning" if good else "error",
                f"excluded from {table.part}: {table.listed(of, cells=first)}: {problem}.",
                check="conversations",
                rows=table.names(of),
                entry=f"{ENTRY}.{next(iter(shape.columns))}",
            )
        yield from look_at_table(table)

    return good, found()
