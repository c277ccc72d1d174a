"""Rows turned into the samples of a dataset, a thousand at a time: a list, or a dataset on the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright.cli.tasks.local_files import Row
from trainwright.cli.tasks.source import Rows
from trainwright.cli.tasks.task_objects import Dataset

Columns = dict[str, list[Any]]  # Any: cells of a table, then inputs of a model

BATCH = 1000


def encoded(rows: Rows, encode: Callable[[Columns], Columns]) -> Dataset:
    """Encodes rows into samples, of which there may be more or fewer than rows.

    Args:
        rows: cells by column.
        encode: converts columns of a thousand rows into columns of samples.
    """
    if hasattr(rows, "column_names"):
        return rows.map(encode, batched=True, batch_size=BATCH, remove_columns=rows.column_names)
    samples: list[Row] = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        columns = encode({name: [row.get(name) for row in part] for name in part[0]})
        samples += [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return samples


def pieces(ids: list[int], length: int, *, least: int = 2) -> list[list[int]]:
    """Splits a row of ids into rows of at most `length`; a rest shorter than `least` is dropped."""
    return [ids[start : start + length] for start in range(0, len(ids), length) if len(ids) - start >= least]
