"""Ledger: how often each training sample was seen and its losses, and the Parquet file that stores them.

Samples have the numbers of the training dataset; the file also has their names, so that they are found when the data
changes (`capabilities/ledger/rows.py`). Losses come from `capabilities/ledger/sample_losses.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trainwright._types import JSONObject, is_count, replacing
from trainwright.capability_table import FILES
from trainwright.data.identity import SampleId, as_hex, parse_hex
from trainwright.errors import DataError, needs_package
from trainwright.support.door import parse_json

LEDGER_NAME = FILES["ledger"]

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

MAX_SAMPLES = 1 << 40
DTYPES = {
    "visits": np.int32,
    "tokens": np.int64,
    "loss_sum": np.float64,
    "last_loss": np.float64,
    "last_step": np.int32,
}
Array: TypeAlias = "NDArray[Any]"  # the numbers of one column
Columns: TypeAlias = Mapping[str, Array]


class Ledger:
    """Visits, tokens and losses of samples.

    Attributes:
        visits: how often a sample was trained on; a sample that packing splits over rows counts with its first piece.
        tokens: labels that entered its loss, over all visits; 1 per visit if labels are not tokens.
        loss_sum: sum of its loss over these tokens, so that `loss_sum / tokens` is its mean loss.
        last_loss, last_step: mean loss at its last visit and the optimizer step of that visit; NaN if no label counted.
    """

    def __init__(self) -> None:
        self.columns: dict[str, Array] = {name: np.zeros(0, dtype) for name, dtype in DTYPES.items()}

    def __getattr__(self, name: str) -> Array:
        try:
            return vars(self)["columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def mean_loss(self) -> Array:
        """Mean loss of each sample over its tokens; NaN if it has none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.loss_sum / self.tokens

    def add(self, sample: Array, *, step: Array, visits: Array, tokens: Array, loss_sum: Array) -> None:
        """Adds visits in training order; a sample may occur several times."""
        if not len(sample):
            return
        self.reach(int(sample.max()) + 1)
        np.add.at(self.visits, sample, visits)
        np.add.at(self.tokens, sample, tokens)
        np.add.at(self.loss_sum, sample, loss_sum)
        self.last_step[sample] = step
        has_loss = tokens > 0
        self.last_loss[sample[has_loss]] = loss_sum[has_loss] / tokens[has_loss]

    def merge(self, other: Columns) -> None:
        """Adds the records that another process returned from `taken`."""
        sample = other["sample"]
        if not len(sample):
            return
        self.reach(int(sample.max()) + 1)
        for name in ("visits", "tokens", "loss_sum"):
            self.columns[name][sample] += other[name]
        newer = other["last_step"] >= self.last_step[sample]
        self.last_step[sample[newer]] = other["last_step"][newer]
        known = newer & ~np.isnan(other["last_loss"])
        self.last_loss[sample[known]] = other["last_loss"][known]

    def taken(self) -> Columns:
        """Returns the records of samples with visits, and clears them."""
        sample = np.flatnonzero(self.last_step)
        found = {"sample": sample, **{name: column[sample] for name, column in self.columns.items()}}
        self.columns = Ledger().columns
        return found

    def reach(self, size: int) -> None:
        """Extends the columns to hold samples below a number, without visits."""
        missing = size - len(self.visits)
        if missing > 0:
            missing = max(missing, len(self.visits))
            for name, column in self.columns.items():
                fill = np.full(missing, np.nan if name == "last_loss" else 0, column.dtype)
                self.columns[name] = np.concatenate([column, fill])

    # -- files ---------------------------------------------------------------------------------------------------------

    def noted(self) -> Columns:
        """Returns a copy of the columns for samples with visits, including their numbers."""
        sample = np.flatnonzero(self.last_step)
        found = {"sample": sample, **{name: column[sample] for name, column in self.columns.items()}}
        return {**found, "mean_loss": self.mean_loss[sample]}


def as_table(noted: Columns, rows: Mapping[str, Any], about: JSONObject) -> pa.Table:
    """Returns the table for a ledger's file.

    Args:
        noted: columns of the samples with visits.
        rows: columns that name these samples, as `identity_columns` makes them.
        about: metadata for the table.
    """
    with needs_package("The ledger is a Parquet file: pip install pyarrow"):
        import pyarrow as pa
    columns: dict[str, Any] = {"sample": noted["sample"]}
    for name, values in rows.items():
        column = pa.array(values)
        columns[name] = column.dictionary_encode() if name in REPEATED else column
    columns |= {name: noted[name] for name in (*DTYPES, "mean_loss")}
    return pa.table(columns).replace_schema_metadata({"trainwright": json.dumps(about)})


REPEATED = ("source", "file")  # columns with few distinct strings


def identity_columns(names: Sequence[SampleId], contents: Sequence[int | None]) -> dict[str, Any]:
    """Returns the columns of a table that identify samples: names in parts, and row fingerprints."""
    columns: dict[str, Any] = {
        "id": [name.key for name in names],
        "source": [name.source for name in names],
        "row": np.asarray([name.row for name in names], dtype=np.int64),
        "file": [name.file for name in names],
        "is_line": [name.is_line for name in names],
        "part": [name.part for name in names],
        "fingerprint": [None if content is None else as_hex(content) for content in contents],
    }
    if not any(columns["is_line"]):
        del columns["is_line"]
    return {name: values for name, values in columns.items() if not isinstance(values, list) or not _is_empty(values)}


def _is_empty(values: Sequence[object]) -> bool:
    return all(value is None for value in values)


def identities(columns: Mapping[str, Sequence[Any]]) -> Iterator[tuple[SampleId, int | None]]:
    """Yields the name and the fingerprint (None if unknown) of each row of a table, given its columns as lists."""
    num = len(columns["source"])
    nothing = [None] * num
    parts = [columns.get(name, nothing) for name in ("source", "row", "file", "is_line", "part", "id", "fingerprint")]
    for source, row, file, is_line, part, key, content in zip(*parts, strict=True):
        yield SampleId(source, row, file, bool(is_line), part, key), parse_hex(content)


def write_table(table: pa.Table, path: Path) -> None:
    """Writes a ledger's table atomically."""
    from pyarrow import parquet

    with replacing(path) as partial:
        parquet.write_table(table, partial, compression="zstd")


def read_table(path: Path) -> tuple[pa.Table, JSONObject]:
    """Reads a ledger's table and its metadata; DataError if the file is not a ledger."""
    with needs_package("The ledger is a Parquet file: pip install pyarrow"):
        import pyarrow as pa
        from pyarrow import parquet
    try:
        with path.open("rb") as file:  # `is_file` chose the path, so it is not a pipe or a directory
            table = parquet.read_table(file)
        about = parse_json((table.schema.metadata or {})[b"trainwright"])
        _check(table, about)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not the ledger of a run: {error or type(error).__name__}.") from error
    return table, about


def _check(table: pa.Table, about: JSONObject) -> None:
    """Raises ValueError for an invalid table or invalid metadata."""
    sources = about["sources"]
    num_samples = about["num_samples"]
    probes = about.get("probes")
    if not isinstance(probes, dict) or not all(_are_probes(rows) for rows in probes.values()):
        raise ValueError("its metadata is invalid")
    if not isinstance(sources, dict) or not (num_samples is None or is_count(num_samples)):
        raise ValueError("its metadata is invalid")
    for name in ("sample", "mean_loss", *DTYPES):
        column = table[name].to_numpy()
        if column.dtype.kind not in "iuf" or (name == "sample" and column.dtype.kind == "f"):
            raise ValueError(f"the column {name} does not hold numbers")
    _check_identities(table)
    samples = table["sample"].to_numpy()
    if len(samples) and not 0 <= samples.min() <= samples.max() < MAX_SAMPLES:
        raise ValueError("its sample numbers are invalid")


def _are_probes(rows: object) -> bool:
    """Returns whether these may be the probes of a source; ValueError for an invalid fingerprint."""
    if not isinstance(rows, dict):
        return False
    for content in rows.values():
        parse_hex(content)
    return all(place.isdecimal() for place in rows)


def _check_identities(table: pa.Table) -> None:
    """Raises ValueError if the columns that identify samples have wrong types."""
    import pyarrow as pa

    tests = {"source": pa.types.is_string, "row": pa.types.is_integer}
    optional = {"file": pa.types.is_string, "part": pa.types.is_integer, "is_line": pa.types.is_boolean}
    optional |= {"fingerprint": pa.types.is_string}
    for name, is_right in (tests | optional).items():
        if name in optional and name not in table.column_names:
            continue
        kind = table[name].type
        if not is_right(kind.value_type if pa.types.is_dictionary(kind) else kind):
            raise ValueError(f"the column {name} is of the type {kind}")
    if "fingerprint" in table.column_names:
        for text in table["fingerprint"].to_pylist():
            parse_hex(text)


def columns_in(table: pa.Table, path: Path) -> Columns:
    """Returns the columns of a table for `Ledger.merge`; raises DataError if one is missing."""
    try:
        return {name: table[name].to_numpy() for name in ("sample", *DTYPES)}
    except KeyError as error:
        raise DataError(f"{path} is not a ledger: it lacks the column {error}.") from error
