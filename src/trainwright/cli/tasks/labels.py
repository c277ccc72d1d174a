"""Labels of a column: their names, order and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainwright._types import JSONObject
from trainwright.cli.tasks.source import TaskSource
from trainwright.errors import did_you_mean

MOST = 1000  # more labels than this are no labels but numbers or texts


class Labels:
    """Labels of a run, in the order of their numbers, and the number of each value of a cell (as text)."""

    def __init__(self, names: Sequence[str], number_of: dict[str, int]) -> None:
        self.names = list(names)
        self.number_of = number_of

    def of(self, cell: object) -> int:
        return self.number_of[str(cell)]

    @property
    def for_config(self) -> JSONObject:
        return {
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
        }


def find_labels(material: TaskSource, role: str) -> Labels:
    """Returns the labels of a column, as the recipe names them or as found; RecipeError: a row has another one."""
    cells = {name: material.column(rows, role) for name, rows in material.parts}
    for part, column in cells.items():
        num_empty = sum(cell is None or cell == "" for cell in column)
        if num_empty:
            material.wrong(f"{num_empty} of the {part} rows have no label.", "data", "columns", role)
    given = material.recipe.data.labels
    found = {name: _values(column) for name, column in cells.items()}
    if isinstance(given, dict):
        order = list(dict.fromkeys(map(str, given.values())))
        labels = Labels(order, {str(value): order.index(str(name)) for value, name in given.items()})
    elif given is not None:
        labels = _in_order([str(name) for name in given])
    else:
        labels = _declared(material, role) or _in_order(_sorted(set().union(*found.values())))
    for part, values in found.items():
        unknown = _sorted(values - labels.number_of.keys())
        if unknown:
            hint = did_you_mean(unknown[0], list(labels.number_of))
            material.wrong(f"the {part} rows have labels that are not listed: {', '.join(unknown[:5])}.{hint}",
                           "data", "labels")  # fmt: skip
    if len(labels.names) < 2 or len(labels.names) > MOST:
        where = material.recipe.column(role)
        said = "only one label" if len(labels.names) < 2 else f"{len(labels.names)} labels"
        material.wrong(f"the column {where!r} has {said}: {', '.join(labels.names[:5])}.", "data", "columns", role)
    return labels


def _in_order(names: Sequence[str]) -> Labels:
    return Labels(names, {name: number for number, name in enumerate(names)})


def _declared(material: TaskSource, role: str) -> Labels | None:
    """Returns the label names in a dataset of the package datasets, whose cells are numbers."""
    feature = getattr(material.train, "features", {}).get(material.recipe.column(role))
    names = getattr(getattr(feature, "feature", feature), "names", None)
    if names is None:
        return None
    return Labels(list(names), {str(number): number for number in range(len(names))})


def _values(column: Iterable[object]) -> set[str]:
    return {str(one) for cell in column for one in (cell if isinstance(cell, list) else [cell])}


def _sorted(values: Iterable[str]) -> list[str]:
    """Sorts numbers by size, then words."""
    return sorted(values, key=lambda value: (0, float(value), "") if _is_number(value) else (1, 0.0, value))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return value.lower() not in ("nan", "inf", "-inf", "infinity", "-infinity")
