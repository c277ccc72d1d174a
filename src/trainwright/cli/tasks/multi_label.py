"""Several labels for a row: lists of them in a column, or a column of 0 and 1 for each label."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral

from trainwright.errors import DataError
from trainwright.support.door import parse_json

PROBLEM_TYPE = "multi_label_classification"
YES = ("1", "1.0", "true", "yes")
NO = ("0", "0.0", "false", "no")

NameOf = Callable[[int], str]  # the name of a row, by its place


def read_lists(cells: Sequence[object], name_of: NameOf) -> list[list[str]] | None:
    """Returns the labels of each row of a column of lists, also as JSON in a table; None for other columns.

    Raises:
        DataError: some cells are lists, and others are not; or a list has something that is no label.
    """
    is_json = any(isinstance(cell, str) and cell.lstrip().startswith("[") for cell in cells)
    if not is_json and not any(isinstance(cell, (list, tuple)) for cell in cells):
        return None
    return [_read_list(cell, name_of, place) for place, cell in enumerate(cells)]


def _read_list(cell: object, name_of: NameOf, place: int) -> list[str]:
    found = cell
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            found = parse_json(cell)
        except ValueError as error:
            raise DataError(f"{name_of(place)}: {cell!r:.60} is not a list in JSON: {error}.") from None
    if not isinstance(found, (list, tuple)):
        raise DataError(
            f"{name_of(place)}: {cell!r:.60} is not a list of labels, and other rows have lists. Write [] for no label."
        )
    wrong = [label for label in found if not _is_label(label)]
    if wrong:
        raise DataError(
            f"{name_of(place)}: {wrong[0]!r:.60} is not a label. A list has texts or whole numbers; write [] for no "
            "label."
        )
    return [str(label) for label in found]


def _is_label(label: object) -> bool:
    if isinstance(label, str):
        return bool(label.strip())
    return isinstance(label, Integral) and not isinstance(label, bool)


def join_columns(columns: Mapping[str, Sequence[object]], name_of: NameOf) -> list[list[str]]:
    """Returns the labels of each row, from a column of 0 and 1 for each label.

    Raises:
        DataError: a cell is neither.
    """
    return [
        [name for name, cell in zip(columns, cells, strict=True) if _is_set(cell, name, name_of, place)]
        for place, cells in enumerate(zip(*columns.values(), strict=True))
    ]


def _is_set(cell: object, name: str, name_of: NameOf, place: int) -> bool:
    word = "" if cell is None else str(cell).strip().lower()
    if not word:
        raise DataError(f"{name_of(place)}: the cell of the column {name!r} is empty. Write 0 or 1, or remove the row.")
    if word not in YES and word not in NO:
        raise DataError(f"{name_of(place)}: {cell!r:.60} in the column {name!r} is neither 0 nor 1.")
    return word in YES
