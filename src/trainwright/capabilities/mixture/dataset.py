"""Named sources as one dataset: a global index refers to a row of a source. The order of samples is set elsewhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from trainwright._types import DatasetLike, Item, has_length, is_instance_of
from trainwright.data.epochs import call_set_epoch
from trainwright.data.sources import IndexedSources
from trainwright.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SourceUse:
    """How a run uses one source."""

    name: str
    rows: int
    share: float  # share of the samples, at the beginning of the run
    last_share: float  # the same at its end
    visits: float  # visits per row, on average


class MixtureDataset(Dataset[Item], IndexedSources):
    """The rows of several datasets with a length, one dataset after another, as each dataset returns them.

    Args:
        sources: the datasets by name; at least one.
        curriculum: sets the order of samples during training, as a `Curriculum` does; None: the arguments do.

    Attributes:
        sources: the datasets by name.
        names: their names, in order.
        offsets: the global index of the first row of each.

    Raises:
        DataError: there is no source, or a source has no length.

    Example:
        >>> data = MixtureDataset({"code": ["a", "b"], "chat": ["c"]})
        >>> len(data), data[2], data.find_source(2)
        (3, 'c', ('chat', 0))
    """

    def __init__(self, sources: Mapping[str, DatasetLike], curriculum: object | None = None) -> None:
        if not sources:
            raise DataError("train_dataset is an empty dict; it needs at least one {name: dataset}.")
        for name, source in sources.items():
            if not has_length(source) or isinstance(source, IterableDataset):
                raise DataError(
                    f"The source {name!r} of train_dataset is a {type(source).__name__} without a length, but sources "
                    "need one."
                )
        self.sources = dict(sources)
        self.curriculum = curriculum
        self.names = list(sources)
        self.offsets = [0, *accumulate(map(len, sources.values()))]
        self._length = self.offsets.pop()

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Calls `set_epoch` of the sources that have it.

        Args:
            epoch: the next epoch of training, from 0.
        """
        for source in self.sources.values():
            call_set_epoch(source, epoch)

    def __getitem__(self, index: int) -> Item:
        name, row = self.find_source(index)
        return self.sources[name][row]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Returns rows by global index, in order, with one call per source if it can return several rows at once."""
        items: list[Item] = [None] * len(indices)
        at_once: dict[str, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            name, row = self.find_source(index)
            if hasattr(self.sources[name], "__getitems__"):
                at_once.setdefault(name, []).append((place, row))
            else:
                items[place] = self.sources[name][row]
        for name, asked in at_once.items():
            rows = self.sources[name].__getitems__([row for _, row in asked])
            for (place, _), item in zip(asked, rows, strict=True):
                items[place] = item
        return items

    def find_source(self, index: int) -> tuple[str, int]:
        """Finds a row.

        Args:
            index: a global index, from 0.

        Returns:
            The name of its source, and its row there.

        Raises:
            IndexError: there is no such index.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"index {index} is out of range for {self._length} rows")
        number = bisect_right(self.offsets, index) - 1
        return self.names[number], index - self.offsets[number]

    def find_sources(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of each sample's source: its index in `names`."""
        return np.searchsorted(self.offsets, samples, side="right") - 1

    def uses(self, num_epochs: float) -> list[SourceUse]:
        """Returns how a run uses the sources if each row is seen once per epoch.

        Args:
            num_epochs: number of epochs.

        Returns:
            One entry for each source.
        """
        shares = [len(source) / max(self._length, 1) for source in self.sources.values()]
        pairs = zip(self.sources.items(), shares, strict=True)
        return [SourceUse(name, len(source), share, share, num_epochs) for (name, source), share in pairs]

    def with_sources(self, change: Callable[[DatasetLike], DatasetLike]) -> MixtureDataset:
        """Makes a mixture of the same names and lengths.

        Args:
            change: returns the replacement for a source.

        Returns:
            The mixture of the replacements.
        """
        return MixtureDataset({name: change(source) for name, source in self.sources.items()}, self.curriculum)


def check_is_by_index(dataset: Mapping[object, object]) -> None:
    """Raises DataError for a dict with a key that is not a string, unless its keys are the indices of samples."""
    holds_datasets = any(isinstance(one, Dataset) for one in dataset.values())
    if holds_datasets or set(dataset) != set(range(len(dataset))):
        name = next(name for name in dataset if not isinstance(name, str))
        raise DataError(
            f"train_dataset is a dict with the key {name!r}, a {type(name).__name__}. Names of datasets to train on "
            "together must be strings: train_dataset={'code': a, 'chat': b}. A dict of samples has the keys 0, 1, 2 "
            "and so on."
        )


def as_mixture(dataset: DatasetLike) -> DatasetLike:
    """Turns a dict of datasets into a mixture, or into a stream if it contains one.

    Other datasets are returned unchanged, including a dict of samples by index, which is a dataset itself. Raises
    DataError for the splits of one dataset, which must not be trained on together, and for source names that are not
    strings.
    """
    if not isinstance(dataset, Mapping):
        return dataset
    if not all(isinstance(name, str) for name in dataset):
        check_is_by_index(dataset)
        return dataset
    if is_instance_of(dataset, "datasets", "DatasetDict") or is_instance_of(dataset, "datasets", "IterableDatasetDict"):
        raise DataError(
            f"train_dataset is a {type(dataset).__name__} with the splits {', '.join(map(repr, dataset))}. Pass one of "
            "them, or a plain dict of the datasets to train on together: train_dataset={'code': a, 'chat': b}."
        )
    if any(isinstance(source, IterableDataset) for source in dataset.values()):
        from trainwright.capabilities.mixture.stream import MixtureStream

        return MixtureStream(dataset)
    return MixtureDataset(dataset)
