"""Orders whose unit is a whole batch: which samples go together is decided before any of them is read.

An epoch is a list of groups of samples. To everything that deals with positions a group is what a sample is elsewhere:
an index of the order, so that seeking, resuming and sharing among processes need no case of their own. The dataset
wrapper turns such an index into a list of items, and the collator wrapper makes the batch of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, Sampler

from trainwright._types import Batch, DataLoaderLike, DatasetLike, Item
from trainwright.data.samplers import Order

Items = list[Item]
# Any: of datasets, which are the user's own types, and of groups: indices, or rows of pieces of samples.


class BatchOrder(Order, Sampler[Any]):
    """Groups of samples, in an order that is a pure function of seed and epoch. Each is a batch of one process."""

    seed: int  # base of the order
    num_samples: int  # in all groups together
    unit: str  # the settings that decide what a group is; a position counted in other groups means nothing
    epoch: int = 0

    @abstractmethod
    def num_tokens(self, epoch: int) -> int:
        """Tokens of all batches of an epoch as the model gets them, padding included."""

    def num_samples_of(self, group: Sequence[Any]) -> int:
        """Samples that a group adds to those of the epoch."""
        return len(group)

    def of_all_processes(self) -> BatchOrder:
        """The order of the groups of all processes; this one, unless it is one process's."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices(self.epoch))

    def wrap(self, dataset: DatasetLike) -> BatchedDataset:
        """The dataset whose index is a group."""
        return BatchedDataset(dataset)


class BatchedDataset(Dataset[Items]):
    """Gives the items of a group of indices."""

    def __init__(self, dataset: DatasetLike) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, group: Sequence[Any]) -> Items:
        return fetch_items(self.dataset, group)


class SingleBatchCollator:
    """Collates the one group of which a batch consists."""

    def __init__(self, data_collator: Callable[[Items], Batch]) -> None:
        self.data_collator = data_collator

    def __call__(self, groups: list[Items]) -> Batch:
        (group,) = groups
        return self.data_collator(group)


def batch_order_of(dataloader: object) -> BatchOrder | None:
    """The order behind a dataloader whose batches were formed by it; None for any other."""
    order = getattr(getattr(dataloader, "batch_sampler", None), "order", None)
    return order if isinstance(order, BatchOrder) else None


def num_tokens(dataloader: DataLoaderLike) -> int | None:
    """Tokens of an epoch of this process, padding included, where the lengths tell without reading a sample."""
    order = batch_order_of(dataloader)
    if order is None or dataloader.batch_sampler.share.num_processes > 1:
        return None
    return order.num_tokens(dataloader.batch_sampler.epoch)


def fetch_items(dataset: DatasetLike, indices: Iterable[int]) -> Items:
    """Items by index; at once where the dataset can (torch's own protocol for it)."""
    many = getattr(dataset, "__getitems__", None)
    return list(many(list(indices))) if many is not None else [dataset[index] for index in indices]
