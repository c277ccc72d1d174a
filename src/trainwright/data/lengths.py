"""Lengths of the samples of a dataset: from a column of lengths, from Arrow's offsets, or asked by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray
from tqdm.auto import tqdm

from trainwright._types import DatasetLike
from trainwright.data.columns import is_columnar
from trainwright.errors import DataError

Lengths = NDArray[np.int64]
QUIET_S = 2.0  # reading lengths shows its progress when it takes longer


def sample_lengths(
    dataset: DatasetLike, name: str, *, column: str | None = None, show_progress: bool = False
) -> Lengths:
    """Length of each sample: the column of lengths where the dataset has it, else of its entry `name`.

    A `datasets.Dataset` is not read for it: Arrow knows where each list begins. Anything else is asked by index.

    Raises:
        DataError: items without that entry, or lengths that are none.
    """
    if is_columnar(dataset):
        lengths = _of_columns(dataset, name, column)
        if lengths is not None:
            return lengths
    return np.asarray(lengths_of(dataset, name, show_progress=show_progress), dtype=np.int64)


def _of_columns(dataset: DatasetLike, name: str, column: str | None) -> Lengths | None:
    """From the table alone; None where a transform on the fly makes the items, or the entry is no list."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column in dataset.column_names:
        values, source = dataset.data.column(column), column
    elif name in dataset.column_names and dataset.format["type"] != "custom":
        values, source = dataset.data.column(name), name
        is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if not any(test(values.type) for test in is_list):
            return None
        values = pc.list_value_length(values)
    else:
        return None
    if values.null_count or not pa.types.is_integer(values.type):
        what = f"{values.null_count} empty values" if values.null_count else f"values of the type {values.type}"
        raise DataError(f"The column {source!r} should tell the length of each sample, and it has {what}.")
    lengths: Lengths = np.asarray(values.to_numpy(), dtype=np.int64)
    chosen = getattr(dataset, "_indices", None)  # rows of the table that a shuffle or a selection left, in their order
    return lengths if chosen is None else lengths[chosen.column(0).to_numpy()]


def lengths_of(dataset: DatasetLike, name: str, *, show_progress: bool = False) -> list[int]:
    """Length of an entry of each item, asked by index: a dataset need not end with an IndexError.

    Raises:
        DataError: an item has no such entry.
    """
    lengths = []
    for index in tqdm(range(len(dataset)), "Lengths", delay=QUIET_S, disable=not show_progress, leave=False):
        item = dataset[index]
        if not isinstance(item, Mapping) or name not in item:
            has = ", ".join(sorted(item)) if isinstance(item, Mapping) else f"a {type(item).__name__}"
            raise DataError(
                f"Grouping by length needs the length of {name!r}, and item {index} has {has}. Give the dataset a "
                "column with the lengths (length_column_name), or a processing_class whose first model input it has."
            )
        lengths.append(len(item[name]))
    return lengths


def check_lengths(lengths: Sequence[int] | Lengths, longest: int, *, setting: str, cure: str) -> Lengths:
    """The lengths as an array, if each is above 0 and at most `longest`, which `setting` sets.

    Raises:
        DataError: names the first sample that is not, the setting, and the cure.
    """
    array: Lengths = np.asarray(lengths, dtype=np.int64)
    if (array < 1).any():
        index = int((array < 1).argmax())
        raise DataError(f"Sample {index} of the training data has {array[index]} tokens. Leave such samples out.")
    if len(array) and array.max() > longest:
        index = int((array > longest).argmax())
        raise DataError(
            f"Sample {index} of the training data has {array[index]} tokens, more than {setting}={longest} "
            f"({int((array > longest).sum())} of {len(array)} samples are too long). {cure}"
        )
    return array


def lengths_digest(lengths: Sequence[int] | Lengths) -> str:
    """16 hex digits that differ for other lengths: lengths decide an order that groups by them."""
    return xxhash.xxh3_64(np.ascontiguousarray(lengths, dtype=np.int64).tobytes()).hexdigest()
