"""Orders based on the lengths of samples: similar lengths together, or whole batches by a budget; and the lengths."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, Sampler
from tqdm.auto import tqdm

from trainwright._types import Batch, DataLoaderLike, DatasetLike, Item, counted
from trainwright.data.collator_layers import CollatorLayer
from trainwright.data.columns import is_columnar
from trainwright.data.epochs import call_set_epoch
from trainwright.data.order import Order
from trainwright.data.prepared_dataloader import PreparedDataLoader
from trainwright.data.row_names import table_rows
from trainwright.data.sources import IndexedSources
from trainwright.errors import DataError
from trainwright.support.counterparts import Counterpart

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Items = list[Item]
Lengths: TypeAlias = "NDArray[np.int64] | NDArray[np.float64]"
QUIET_S = 2.0  # reading lengths shows progress after this time


def get_length_grouped_indices(
    lengths: Sequence[int],
    batch_size: int,
    mega_batch_mult: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Returns a random order in which neighbours have similar lengths.

    A random permutation is cut into portions of `mega_batch_mult` batches (default 50, or fewer to make four portions),
    and each is sorted, longest first. The longest sample of all comes first, so that running out of memory shows at
    once.

    Args:
        lengths: length of each sample.
        batch_size: samples of a batch.
        mega_batch_mult: batches per portion.
        generator: random generator; default torch's global generator.

    Returns:
        Indices of all samples.
    """
    num = len(lengths)
    if mega_batch_mult is None:
        mega_batch_mult = max(min(num // (batch_size * 4), 50), 1)
    size = mega_batch_mult * batch_size
    shuffled = torch.randperm(num, generator=generator)
    negative = -np.asarray(lengths)
    drawn = shuffled.numpy()
    portions = [drawn[i : i + size] for i in range(0, num, size)]
    portions = [portion[np.argsort(negative[portion], kind="stable")] for portion in portions]
    longest = min(range(len(portions)), key=lambda i: negative[portions[i][0]])
    indices: list[int] = np.concatenate(portions).tolist()
    indices[0], indices[longest * size] = indices[longest * size], indices[0]
    return indices


class LengthGroupedSampler(Sampler[int], Counterpart, original="transformers.trainer_pt_utils"):
    """Samples in random order, with similar lengths together, so that batches need little padding.

    Args:
        batch_size: number of samples to keep similar in length: a batch, or a whole window.
        dataset: read for the length of `model_input_name` of each item, if `lengths` is not given.
        lengths: length of each sample.
        model_input_name: the input to measure; default "input_ids".
        generator: random generator; default torch's global generator.

    Raises:
        ValueError: neither `dataset` nor `lengths` was given.
        DataError: items lack that input.
    """

    def __init__(
        self,
        batch_size: int,
        dataset: DatasetLike = None,
        lengths: Sequence[int] | Lengths | torch.Tensor | None = None,
        model_input_name: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if lengths is None and dataset is None:
            raise ValueError("A sampler by length needs lengths, or a dataset to measure; both are None.")
        self.model_input_name = model_input_name or "input_ids"
        lengths = sample_lengths(dataset, self.model_input_name) if lengths is None else lengths
        self.lengths: list[int] = list(lengths) if isinstance(lengths, Sequence) else lengths.tolist()
        self.batch_size = batch_size
        self.generator = generator
        self.length_column: str | None = None  # otherwise, the column that the lengths came from

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=self.generator))


class SortedByLength(Sampler[int]):
    """All samples, longest first. Attribute `places`: the indices in this order, to put results back in place."""

    def __init__(self, lengths: Sequence[int] | Lengths) -> None:
        self.places: NDArray[np.int64] = np.argsort(-np.asarray(lengths), kind="stable")

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[int]:
        return iter(self.places.tolist())


# -- orders of whole batches -----------------------------------------------------------------------------------------


class BatchOrder(Order, Sampler[Any]):  # Any: groups are lists of indices, or rows of pieces of samples
    """Groups of samples, in an order that is a pure function of seed and epoch. Each group is a batch of one process.

    For everything that handles positions, a group takes the role of a sample: it is an index of the order, so that
    seeking, resuming and distributing among processes need no special case. The dataset wrapper turns such an index
    into a list of items, and the collator wrapper makes a batch from it.
    """

    seed: int  # base of the order
    num_samples: int  # in all groups together
    unit: str  # the settings that define a group; positions counted in other groups are not comparable
    batcher: Any = None  # Any: the `Batcher` that formed the groups, which is above this module; None: another way
    epoch: int = 0
    gives_groups = True

    @abstractmethod
    def num_tokens(self, epoch: int) -> int:
        """Returns the tokens in all batches of an epoch as the model gets them, padding included."""

    def count_samples(self, group: Sequence[Any]) -> int:
        """Returns the number of an epoch's samples that a group accounts for."""
        return len(group)

    def for_all_processes(self) -> BatchOrder:
        """Returns the order of the groups of all processes; self, unless it belongs to one process."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Starts the next iteration at this epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices(self.epoch))

    def wrap(self, dataset: DatasetLike) -> BatchedDataset:
        """Returns the dataset indexed by groups."""
        return BatchedDataset(dataset)


class BatchedDataset(Dataset[Items]):
    """Returns the items of a group of indices."""

    def __init__(self, dataset: DatasetLike) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the user's dataset."""
        call_set_epoch(self.dataset, epoch)

    def __getitem__(self, group: Sequence[Any]) -> Items:
        return fetch_items(self.dataset, group)


class SingleBatchCollator(CollatorLayer):
    """Collates the single group that a batch consists of."""

    def __init__(self, data_collator: Callable[[Items], Batch]) -> None:
        self.data_collator = data_collator

    def __call__(self, groups: list[Items]) -> Batch:
        (group,) = groups
        batch: Batch = self.data_collator(group)
        return batch


def find_batch_order(dataloader: object) -> BatchOrder | None:
    """Returns the order that formed a dataloader's batches; None for any other dataloader."""
    order = getattr(getattr(dataloader, "batch_sampler", None), "order", None)
    return order if isinstance(order, BatchOrder) else None


def num_samples(dataloader: DataLoaderLike) -> int:
    """Returns the number of samples in a dataloader's epoch, without excluded ones."""
    batches = getattr(dataloader, "batch_sampler", None)
    order = getattr(batches, "order", None)
    if isinstance(order, Order) and order.samples_per_epoch is not None:
        return order.samples_per_epoch
    excluding = dataloader if isinstance(dataloader, PreparedDataLoader) else batches
    return len(dataloader.dataset) - int(getattr(excluding, "num_missing", 0))


def num_tokens(dataloader: DataLoaderLike) -> int | None:
    """Returns the tokens of this process in an epoch, padding included, if the lengths are known without reading."""
    order = find_batch_order(dataloader)
    if order is None or dataloader.batch_sampler.share.num_processes > 1:
        return None
    return order.num_tokens(dataloader.batch_sampler.epoch)


def fetch_items(dataset: DatasetLike, indices: Iterable[int]) -> Items:
    """Returns items by index, in one call if the dataset supports it (torch's `__getitems__`)."""
    many = getattr(dataset, "__getitems__", None)
    return list(many(list(indices))) if many is not None else [dataset[index] for index in indices]


# -- lengths of the samples --------------------------------------------------------------------------------------------


def sample_lengths(
    dataset: DatasetLike, name: str, *, column: str | None = None, show_progress: bool = False
) -> Lengths:
    """Returns the length of each sample: from the length column if there is one, else by measuring the entry `name`.

    A `datasets.Dataset` is not read for this: Arrow stores where each list begins. Anything else is read by index.
    Raises DataError for items without that entry, and for invalid lengths.
    """
    if isinstance(dataset, IndexedSources):
        found = [
            sample_lengths(one, name, column=column, show_progress=show_progress) for one in dataset.sources.values()
        ]
        return _as_lengths(np.concatenate(found))
    lengths = _read_columns(dataset, name, column) if is_columnar(dataset) else None
    if lengths is not None:
        return lengths
    return np.asarray(read_lengths(dataset, name, show_progress=show_progress), dtype=np.int64)


def _read_columns(dataset: DatasetLike, name: str, column: str | None) -> Lengths | None:
    """Returns lengths from the table alone; None if items are transformed on the fly or the entry is not a list."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values: Any
    if column in dataset.column_names and _are_lengths(dataset.data.column(column), str(column)):
        values = dataset.data.column(column)
    elif name in dataset.column_names and dataset.format["type"] != "custom":
        values = dataset.data.column(name)
        is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if values.null_count or not any(test(values.type) for test in is_list):
            return None
        values = pc.list_value_length(values)
    else:
        return None
    lengths = _as_lengths(values.to_numpy())
    rows = table_rows(dataset)
    return lengths if rows is None else lengths[rows]


def _are_lengths(values: Any, column: str) -> bool:
    """Returns True if a column has a number for each sample; otherwise warns that it is not used."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_float = pa.types.is_floating(values.type)
    num_empty = values.null_count + (pc.sum(pc.invert(pc.is_finite(values))).as_py() or 0 if is_float else 0)
    if num_empty == 0 and (is_float or pa.types.is_integer(values.type)):
        return True
    what = f"{num_empty} empty values" if num_empty else f"values of the type {values.type}"
    logger.warning(
        "The column %r should hold the length of each sample, but has %s. The samples are measured instead.",
        column,
        what,
    )
    return False


def _as_lengths(values: Any) -> Lengths:
    """Returns lengths as integers, or as floats if they are fractions."""
    array: Lengths = np.asarray(values)
    return array.astype(np.float64) if array.dtype.kind == "f" else array.astype(np.int64)


def read_lengths(dataset: DatasetLike, name: str, *, show_progress: bool = False) -> list[int]:
    """Returns the length of an entry of each item, by index (so no IndexError is needed at the end), or a DataError."""
    lengths = []
    for index in tqdm(range(len(dataset)), "Lengths", delay=QUIET_S, disable=not show_progress, leave=False):
        item = dataset[index]
        if not isinstance(item, Mapping) or name not in item:
            has = ", ".join(sorted(item)) if isinstance(item, Mapping) else f"a {type(item).__name__}"
            raise DataError(
                f"Grouping by length needs the length of {name!r}, but item {index} has {has}. Give the dataset a "
                "column with the lengths (length_column_name), or pass a processing_class with a matching first model "
                "input."
            )
        lengths.append(len(item[name]))
    return lengths


def check_lengths(lengths: Sequence[int] | Lengths, longest: int, *, setting: str, cure: str) -> NDArray[np.int64]:
    """Returns the lengths as an array; DataError if one is not above 0 and at most `longest`, set by `setting`."""
    array: NDArray[np.int64] = np.ceil(np.asarray(lengths)).astype(np.int64)
    if (array < 1).any():
        index = int((array < 1).argmax())
        raise DataError(f"Sample {index} of the training data has {array[index]} tokens. Remove such samples.")
    if len(array) and array.max() > longest:
        index = int((array > longest).argmax())
        raise DataError(
            f"Sample {index} of the training data has {array[index]} tokens, more than {setting}={longest} "
            f"(too long: {int((array > longest).sum())} of {counted(len(array), 'sample')}). {cure}"
        )
    return array


def lengths_digest(lengths: Sequence[int] | Lengths) -> str:
    """Returns 16 hex digits that differ for different lengths, since lengths define an order that groups by them."""
    return xxhash.xxh3_64(np.ascontiguousarray(_as_lengths(lengths)).tobytes()).hexdigest()
