"""Several labels for a row: lists of them in a column, or a column of 0 and 1 for each label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainwright.errors import DataError
from trainwright.support.door import parse_json

PROBLEM_TYPE = "multi_label_classification"
YES = ("1", "1.0", "true", "yes")
NO = ("0", "0.0", "false", "no", "", "none")


def read_lists(cells: Sequence[object]) -> list[list[str]] | None:
    """Returns the labels of each row of a column of lists, also as JSON in a table; None for other columns.

    Raises:
        DataError: some cells are lists, and others are not.
    """
    is_json = any(isinstance(cell, str) and cell.lstrip().startswith("[") for cell in cells)
    if not is_json and not any(isinstance(cell, (list, tuple)) for cell in cells):
        return None
    return [_read_list(cell) for cell in cells]


def _read_list(cell: object) -> list[str]:
    found = cell
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            found = parse_json(cell)
        except ValueError as error:
            raise DataError(f"{cell!r:.60} is not a list in JSON: {error}.") from None
    if not isinstance(found, (list, tuple)):
        raise DataError(f"{cell!r:.60} is not a list of labels, and other rows have lists. Write [] for no label.")
    return [str(label) for label in found]


def join_columns(columns: Mapping[str, Sequence[object]]) -> list[list[str]]:
    """Returns the labels of each row, from a column of 0 and 1 for each label.

    Raises:
        DataError: a cell is neither.
    """
    return [
        [name for name, cell in zip(columns, cells, strict=True) if _is_set(cell, name)]
        for cells in zip(*columns.values(), strict=True)
    ]


def _is_set(cell: object, name: str) -> bool:
    word = str(cell).strip().lower()
    if word not in YES and word not in NO:
        raise DataError(f"{cell!r:.60} in the column {name!r} is neither 0 nor 1.")
    return word in YES
