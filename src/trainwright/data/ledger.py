"""Ledger: how often each sample of the training data was trained, and what its loss was; the Parquet file of it.

Samples are numbered as the training dataset numbers them, and no sample is looked at. Losses come from
`extensions/ledger/sample_losses.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trainwright._types import JSONObject, is_count, replacing
from trainwright.errors import DataError, needs_package

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

MAX_SAMPLES = 1 << 40
ONE_SOURCE = "train"  # of a dataset that is no mixture
DTYPES = {
    "visits": np.int32,
    "tokens": np.int64,
    "loss_sum": np.float64,
    "last_loss": np.float64,
    "last_step": np.int32,
}
Array: TypeAlias = "NDArray[Any]"  # of the numbers of one column
Columns: TypeAlias = Mapping[str, Array]
Locate: TypeAlias = Callable[[int], tuple[str, int]]  # the source of a sample, and its row there


class Ledger:
    """Visits, tokens and losses of samples.

    Attributes:
        visits: how often a sample was trained; one that packing splits over rows counts with its beginning.
        tokens: labels that entered its loss, over all visits; 1 a visit where labels are not tokens.
        loss_sum: sum of its loss over these tokens, so that `loss_sum / tokens` is its mean loss.
        last_loss, last_step: mean loss at its last visit, and the optimizer step of it; NaN where no label counted.
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
        """Mean loss of each sample over its tokens; NaN where it has none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.loss_sum / self.tokens

    def add(self, sample: Array, *, step: Array, visits: Array, tokens: Array, loss_sum: Array) -> None:
        """Adds visits in the order in which they were trained; a sample may come several times."""
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
        """Adds what another process noted since the last time, as `taken` returns it."""
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
        """Returns what is noted of the samples with visits, and forgets it."""
        sample = np.flatnonzero(self.last_step)
        found = {"sample": sample, **{name: column[sample] for name, column in self.columns.items()}}
        self.columns = Ledger().columns
        return found

    def reach(self, size: int) -> None:
        """Makes room for the samples below a number, without visits."""
        missing = size - len(self.visits)
        if missing > 0:
            missing = max(missing, len(self.visits))
            for name, column in self.columns.items():
                fill = np.full(missing, np.nan if name == "last_loss" else 0, column.dtype)
                self.columns[name] = np.concatenate([column, fill])

    # -- files ---------------------------------------------------------------------------------------------------------

    def table(
        self,
        about: JSONObject,
        *,
        locate: Locate | None = None,
        ids: Callable[[list[int]], list[Any]] | None = None,
    ) -> pa.Table:
        """Returns the samples with visits as a table; `about` goes into its metadata, `ids` are values of a column."""
        with needs_package("The ledger is a Parquet file: pip install pyarrow"):
            import pyarrow as pa
        sample = np.flatnonzero(self.last_step)
        columns: dict[str, Any] = {"sample": sample}
        if ids is not None:
            columns["id"] = pa.array(ids(sample.tolist()))
        sources, rows = ([ONE_SOURCE] * len(sample), sample) if locate is None else _located(sample, locate)
        columns |= {"source": pa.array(sources, pa.string()).dictionary_encode(), "row": rows}
        columns |= {name: column[sample] for name, column in self.columns.items()}
        columns["mean_loss"] = self.mean_loss[sample]
        return pa.table(columns).replace_schema_metadata({"trainwright": json.dumps(about)})


def _located(sample: Array, locate: Locate) -> tuple[list[str], list[int]]:
    places = [locate(one) for one in sample.tolist()]
    return [source for source, _ in places], [row for _, row in places]


def write_table(table: pa.Table, path: Path) -> None:
    """Writes a ledger's table as a whole or not at all."""
    from pyarrow import parquet

    with replacing(path) as partial:
        parquet.write_table(table, partial, compression="zstd")


def read_table(path: Path) -> tuple[pa.Table, JSONObject]:
    """Reads a ledger's table, and what its metadata says; DataError if it is no ledger."""
    with needs_package("The ledger is a Parquet file: pip install pyarrow"):
        import pyarrow as pa
        from pyarrow import parquet
    try:
        with path.open("rb") as file:  # a pipe or a directory does not come here: `is_file` chose the path
            table = parquet.read_table(file)
        about = json.loads((table.schema.metadata or {})[b"trainwright"])
        _check(table, about)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not the ledger of a run: {error or type(error).__name__}.") from error
    return table, about


def _check(table: pa.Table, about: JSONObject) -> None:
    """Raises ValueError for a table or metadata that no run writes."""
    sources = about["sources"]
    num_samples = about["num_samples"]
    if not isinstance(sources, dict | None) or not (num_samples is None or is_count(num_samples)):
        raise ValueError("its metadata holds values that no run writes")
    for name in ("sample", "mean_loss", *DTYPES):
        column = table[name].to_numpy()
        if column.dtype.kind not in "iuf" or (name == "sample" and column.dtype.kind == "f"):
            raise ValueError(f"the column {name} holds no numbers")
    samples = table["sample"].to_numpy()
    if len(samples) and not 0 <= samples.min() <= samples.max() < MAX_SAMPLES:
        raise ValueError("it numbers samples as no data does")


def read_columns(path: Path) -> Columns:
    """Reads what `Ledger.merge` takes; DataError if the file is something else."""
    table, _ = read_table(path)
    try:
        return {name: table[name].to_numpy() for name in ("sample", *DTYPES)}
    except KeyError as error:
        raise DataError(f"{path} is not a ledger: it lacks the column {error}.") from error
