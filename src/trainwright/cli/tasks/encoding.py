"""Rows turned into the samples of a dataset, a thousand at a time: a list, or a dataset on the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright.cli.tasks.source import Rows

Columns = dict[str, list[Any]]  # Any: cells of a table, then inputs of a model

BATCH = 1000


def encoded(rows: Rows, encode: Callable[[Columns], Columns]) -> Any:
    """One sample for each entry that `encode` gives; there may be more of them, or fewer, than rows."""
    if hasattr(rows, "column_names"):
        return rows.map(encode, batched=True, batch_size=BATCH, remove_columns=rows.column_names)
    samples: list[dict[str, Any]] = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        columns = encode({name: [row.get(name) for row in part] for name in part[0]})
        samples += [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return samples


def pieces(ids: list[int], length: int, *, least: int = 2) -> list[list[int]]:
    """A long row in rows of at most `length`; what is left over and shorter than `least` is dropped."""
    return [ids[start : start + length] for start in range(0, len(ids), length) if len(ids) - start >= least]
