"""Samplers that put samples of similar length together, and the lengths of the samples of a dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, Sampler
from tqdm.auto import tqdm

from trainwright._types import DatasetLike
from trainwright.data.columns import is_columnar
from trainwright.errors import DataError

logger = logging.getLogger(__name__)


def get_length_grouped_indices(
    lengths: Sequence[int],
    batch_size: int,
    mega_batch_mult: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """A random order in which neighbours have similar lengths.

    A random permutation is cut into portions of `mega_batch_mult` batches (default 50, or as many as give four
    portions, whichever is less) and each is sorted, longest first. The longest sample of all comes first, so that
    too little memory shows at once.

    Args:
        lengths: of each sample.
        batch_size: samples of a batch.
        mega_batch_mult: batches of a portion.
        generator: random source; default torch's global one.

    Returns:
        Indices of all samples.
    """
    num = len(lengths)
    if mega_batch_mult is None:
        mega_batch_mult = max(min(num // (batch_size * 4), 50), 1)
    size = mega_batch_mult * batch_size
    shuffled = torch.randperm(num, generator=generator)
    negative, drawn = -np.asarray(lengths), shuffled.numpy()
    portions = [drawn[i : i + size] for i in range(0, num, size)]
    portions = [portion[np.argsort(negative[portion], kind="stable")] for portion in portions]
    longest = min(range(len(portions)), key=lambda i: negative[portions[i][0]])
    indices: list[int] = np.concatenate(portions).tolist()
    indices[0], indices[longest * size] = indices[longest * size], indices[0]
    return indices


class LengthGroupedSampler(Sampler[int]):
    """Samples in random order, those of similar length together, so that batches need little padding.

    Args:
        batch_size: samples for which similar length matters: a batch, or a whole window of them.
        dataset: asked for the length of `model_input_name` of each item, if `lengths` is not given.
        lengths: length of each sample.
        model_input_name: input whose length counts; default "input_ids".
        generator: random source; default torch's global one.

    Raises:
        ValueError: neither dataset nor lengths.
        DataError: items without that input.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: DatasetLike = None,
        lengths: Sequence[int] | Lengths | torch.Tensor | None = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.lengths = _known_lengths(lengths, dataset, model_input_name)
        self.generator = generator
        self.model_input_name = model_input_name or "input_ids"
        self.length_column: str | None = None  # where else the lengths came from

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=self.generator))


class DistributedLengthGroupedSampler(DistributedSampler[int]):
    """One process's part of such an order: every `num_replicas`-th sample of it, as many for each process.

    Args:
        batch_size: samples for which similar length matters.
        dataset: as of LengthGroupedSampler.
        lengths: as of LengthGroupedSampler.
        model_input_name: as of LengthGroupedSampler.
        num_replicas: processes; by default those of torch.distributed.
        rank: which of them this is; by default torch.distributed knows.
        seed: epoch e is drawn from `seed + e`.
        drop_last: leave out samples that not every process would have one of; otherwise the first ones come again.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: DatasetLike = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Sequence[int] | Lengths | torch.Tensor | None = None,
        model_input_name: str | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.lengths = _known_lengths(lengths, dataset, model_input_name)
        super().__init__(self.lengths, num_replicas, rank, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        indices = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        indices += indices[: max(self.total_size - len(indices), 0)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])


def _known_lengths(
    lengths: Sequence[int] | Lengths | torch.Tensor | None, dataset: DatasetLike, input_name: str | None
) -> list[int]:
    if lengths is None:
        if dataset is None:
            raise ValueError("A sampler by length needs the lengths, or a dataset to ask for them; both are None.")
        lengths = sample_lengths(dataset, input_name or "input_ids")
    return list(lengths) if isinstance(lengths, Sequence) else lengths.tolist()


# -- lengths of the samples --------------------------------------------------------------------------------------------


Lengths = NDArray[np.int64] | NDArray[np.float64]
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

    values: Any
    if column in dataset.column_names and _are_lengths(dataset.data.column(column), str(column)):
        values = dataset.data.column(column)
    elif name in dataset.column_names and dataset.format["type"] != "custom":
        values = dataset.data.column(name)
        is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if not any(test(values.type) for test in is_list):
            return None
        values = pc.list_value_length(values)
    else:
        return None
        if values.null_count:
            return None
    lengths = _as_lengths(values.to_numpy())
    chosen = getattr(dataset, "_indices", None)  # rows of the table that a shuffle or a selection left, in their order
    return lengths if chosen is None else lengths[chosen.column(0).to_numpy()]


def _are_lengths(values: Any, column: str) -> bool:
    """Returns True if a column has a number for each sample; warns where it has not, since then it is not used."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_float = pa.types.is_floating(values.type)
    num_empty = values.null_count + (pc.sum(pc.invert(pc.is_finite(values))).as_py() or 0 if is_float else 0)
    if num_empty == 0 and (is_float or pa.types.is_integer(values.type)):
        return True
    what = f"{num_empty} empty values" if num_empty else f"values of the type {values.type}"
    logger.warning(
        "The column %r should tell the length of each sample, and it has %s: the samples are measured instead.",
        column, what,
    )  # fmt: skip
    return False


def _as_lengths(values: Any) -> Lengths:
    """Whole numbers, or fractions where they are."""
    array: Lengths = np.asarray(values)
    return array.astype(np.float64) if array.dtype.kind == "f" else array.astype(np.int64)


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


def check_lengths(lengths: Sequence[int] | Lengths, longest: int, *, setting: str, cure: str) -> NDArray[np.int64]:
    """The lengths as an array, if each is above 0 and at most `longest`, which `setting` sets.

    Raises:
        DataError: names the first sample that is not, the setting, and the cure.
    """
    array: NDArray[np.int64] = np.ceil(np.asarray(lengths)).astype(np.int64)
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
    return xxhash.xxh3_64(np.ascontiguousarray(_as_lengths(lengths)).tobytes()).hexdigest()
