"""Rows after `data.map`: a function of the user takes each row, and returns it changed, or None to leave it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainwright.cli.user_code import describe_failure
from trainwright.errors import DataError

Row = dict[str, Any]
Function = Callable[[Row], Mapping[str, Any] | None]

KEPT = "trainwright_is_kept"  # column, while a dataset is mapped
BATCH = 1000


def map_row(function: Function, row: Mapping[str, Any], name: object) -> Row | None:
    """Returns a row as the function returns it.

    Args:
        function: the user's; it gets a dict of its own.
        row: the row, as it was read.
        name: of the row, for errors.

    Raises:
        DataError: the function failed, or returned something else.
    """
    try:
        found = function(dict(row))
    # whatever the user's function raises, an exit too
    except (Exception, SystemExit) as error:
        raise DataError(f"data.map: the function failed at {name}: {describe_failure(error)}") from error
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise DataError(
            f"data.map: the function returned a {type(found).__name__} for {name}. Return the row, a dict, or None to "
            "leave it out."
        )
    return dict(found)


def map_dataset(function: Function, rows: Any, names: Sequence[object]) -> Any:
    """Returns a `datasets.Dataset` with the rows as the function returns them; they keep their places in the table."""

    def batch(columns: dict[str, list[Any]], places: list[int]) -> dict[str, list[Any]]:
        given = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        found = [map_row(function, row, names[place]) for row, place in zip(given, places, strict=True)]
        columns_found = dict.fromkeys(name for row in found if row is not None for name in row)
        made = {name: [None if row is None else row.get(name) for row in found] for name in columns_found}
        return {**made, KEPT: [row is not None for row in found]}

    # The package's cache does not see that a function of a module has changed.
    mapped = rows.map(
        batch,
        batched=True,
        batch_size=BATCH,
        with_indices=True,
        remove_columns=rows.column_names,
        load_from_cache_file=False,
    )
    kept = [place for place, is_kept in enumerate(mapped[KEPT]) if is_kept]
    mapped = mapped.remove_columns(KEPT)
    return mapped if len(kept) == len(mapped) else mapped.select(kept)


def map_rows(function: Function, rows: Sequence[Any]) -> Iterator[tuple[Row, Any]]:
    """Yields the rows of files as the function returns them, each with the name that it had."""
    for row in rows:
        found = map_row(function, row, row.name)
        if found is not None:
            yield found, row.name
