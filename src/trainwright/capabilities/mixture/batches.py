"""Batches of a mixture formed by length, packed or within a token budget, from portions of its order.

The samples of an epoch, in the order of the mixture, are cut into portions, and batches are formed from each; so shares
hold in every portion, and so does a schedule of shares. The batches form an endless sequence, and every epoch has as
many as the first. If the lengths of samples differ between epochs, later epochs may begin some batches before or after
the epoch of samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from trainwright._types import DatasetLike
from trainwright.capabilities.mixture.order import MixtureOrder, ShareCurve
from trainwright.data.batcher import Batcher
from trainwright.data.cursor import Cursor, OrderKind
from trainwright.data.length_sampler import BatchedDataset, BatchOrder, Lengths, lengths_digest
from trainwright.data.order import Exclusion
from trainwright.data.seeding import derive_seed
from trainwright.errors import DataError

PORTION = 1024  # samples per portion, at least
MIN_BATCHES = 64  # batches per portion, roughly


class MixtureBatches(BatchOrder):
    """Groups of samples of a mixture, each a batch of one process.

    Args:
        mixture: order of the samples.
        lengths: lengths of all rows, by global index.
        batcher: forms batches.
        example: the batches formed from all rows, each used once.
    """

    exclusion = Exclusion.SAME_SHARES

    def __init__(self, mixture: MixtureOrder, lengths: Lengths, batcher: Batcher, example: BatchOrder) -> None:
        super().__init__()
        self.mixture = mixture
        self._lengths = lengths
        self.batcher: Batcher = batcher
        self._example = example
        self.seed = mixture.seed
        self.num_samples = mixture.num_samples
        self.samples_per_epoch = mixture.num_samples
        self._portion = max(PORTION, MIN_BATCHES * -(-len(lengths) // len(example)))
        self.unit = f"{example.unit} of portions of {self._portion}"
        self._counts: list[int] = []  # batches in each known epoch of samples

    def __len__(self) -> int:
        return self._count(0)

    def indices(self, epoch: int) -> Iterator[Any]:
        left = len(self)
        first = epoch * len(self)
        of_samples = 0
        while first >= self._count(of_samples):
            first -= self._count(of_samples)
            of_samples += 1
        while left > 0:
            for chosen, order in self._portions(of_samples):
                groups = itertools.islice(order.indices(0), first, first + left) if first < len(order) else ()
                first = max(first - len(order), 0)
                for group in groups:
                    yield self._by_index(group, chosen)
                    left -= 1
            of_samples += 1

    def _count(self, epoch: int) -> int:
        """Returns the number of batches in an epoch of samples."""
        while len(self._counts) <= epoch:
            self._counts.append(sum(len(order) for _, order in self._portions(len(self._counts))))
        return self._counts[epoch]

    def _portions(self, epoch: int) -> Iterator[tuple[list[int], BatchOrder]]:
        """Yields the samples of each portion of an epoch, and their batches."""
        self.mixture.seed = self.seed
        size = self.num_samples
        for first in range(epoch * size, (epoch + 1) * size, self._portion):
            chosen = self.mixture.at(first, min(first + self._portion, (epoch + 1) * size))
            seed = derive_seed((self.seed, first))
            yield chosen.tolist(), self.batcher.make_order(self._lengths[chosen], seed=seed, drop_last=False)

    def _by_index(self, group: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
        if self.batcher.packed_input is None:
            return [chosen[place] for place in group]
        return [[(chosen[place], start, stop) for place, start, stop in row] for row in group]

    def count_samples(self, group: Sequence[Any]) -> int:
        return self._example.count_samples(group)

    def num_tokens(self, epoch: int) -> int:
        return sum(order.num_tokens(0) for _, order in self._portions(epoch))

    def wrap(self, dataset: DatasetLike) -> BatchedDataset:
        return self._example.wrap(dataset)

    @cached_property
    def _digest(self) -> str:
        return lengths_digest(self._lengths)

    def describe(self) -> OrderKind:
        return {**self.mixture.describe(), "kind": "mixture_batches", "unit": self.unit, "lengths": self._digest}

    def continue_from(self, cursor: Cursor) -> str:
        before = cursor.order or {}
        if before.get("kind") != "mixture_batches":
            return ""
        if before["settings"] == self.mixture.settings:
            self.mixture.curve = ShareCurve.from_json(str(before["shares"]))
            self._counts.clear()
        elif cursor.samples > 0:
            raise DataError(
                "The checkpoint was saved in the middle of an epoch, and its batches were formed by length from "
                "another mixture, so the remaining samples are unknown. Resume with the same mixture, or restart that "
                "epoch with ignore_data_skip=True."
            )
        return ""
