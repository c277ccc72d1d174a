"""Windows of a fixed number of samples, split into micro-batches of similar cost for all processes and slots.

Each optimizer step trains on the same samples as with a random order. They are sorted by length, longest first, and cut
into one group per process and accumulation slot, so that the most expensive group is as cheap as possible; groups of
similar cost go to the same slot of different processes. Long samples end up in small groups, short samples in large
groups.

    cost(group) = samples x (longest + 0.001 x longest²)        padding counts; the square models attention

The smallest possible bound on the cost of all groups is found by bisection: for a given bound, the fewest groups result
from filling one after another up to it. Within that bound, each group is then given its share of the remaining cost.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import torch

from trainwright.data.cursor import OrderKind
from trainwright.data.length_sampler import BatchOrder, lengths_digest
from trainwright.errors import ArgumentError

ATTENTION_COST = 0.001


class BatchRebalanceSampler(BatchOrder):
    """Micro-batches of similar cost, on every process and in every slot of a window.

    Iterating over it yields the lists of indices of process `rank`. A trainer takes the groups of all processes
    (`indices`) and distributes them itself.

    Args:
        lengths: length of each sample.
        effective_batch_size: samples per optimizer step, over all processes.
        dp_size: number of processes.
        grad_accum: micro-batches per optimizer step.
        shuffle: draw a new order for each epoch.
        seed: epoch e is drawn from `seed + e`.
        rank: this process.
        drop_last: drop the last samples, which do not fill a window.

    Raises:
        ArgumentError: a window has fewer samples than groups.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        effective_batch_size: int,
        dp_size: int,
        grad_accum: int,
        shuffle: bool = True,
        seed: int = 42,
        rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        if min(dp_size, grad_accum) < 1 or effective_batch_size < dp_size * grad_accum:
            raise ArgumentError(
                f"effective_batch_size={effective_batch_size} samples cannot be split into dp_size={dp_size} x "
                f"grad_accum={grad_accum} groups of one sample at least."
            )
        self.lengths = [int(length) for length in lengths]
        self.effective_batch_size = effective_batch_size
        self.dp_size = dp_size
        self.grad_accum = grad_accum
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.drop_last = drop_last
        self.unit = f"batch_rebalance of {effective_batch_size} samples into {dp_size} x {grad_accum}"
        full, rest = divmod(len(self.lengths), effective_batch_size)
        self._rest = 0 if drop_last else rest
        self._full = full
        self.num_samples = full * effective_batch_size + self._rest

    @property
    def num_groups(self) -> int:
        """Micro-batches in a window, over all processes."""
        return self.dp_size * self.grad_accum

    def __len__(self) -> int:
        """Micro-batches in an epoch on one process."""
        return (self._full + (self._rest > 0)) * self.grad_accum

    def for_all_processes(self) -> BatchOrder:
        return _OfAllProcesses(self)

    def windows(self, epoch: int) -> Iterator[list[int]]:
        """Returns the samples of each optimizer step."""
        num = len(self.lengths)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(num, generator=generator).tolist() if self.shuffle else list(range(num))
        for start in range(0, self.num_samples, self.effective_batch_size):
            yield order[start : start + self.effective_batch_size]

    def indices(self, epoch: int) -> Iterable[list[int]]:
        """Returns the micro-batches of this process, one per slot."""
        first: list[int] = []
        for window in self.windows(epoch):
            first = first or window
            # the last window has fewer samples than groups: some samples are repeated
            while len(window) < self.num_groups:
                window = window + first[: self.num_groups - len(window)]
            yield from self._split(window)[self.rank :: self.dp_size]

    def describe(self) -> OrderKind:
        return {"kind": "batch_rebalance", "unit": self.unit, "shuffle": self.shuffle, "lengths": self._digest}

    @functools.cached_property
    def _digest(self) -> str:
        return lengths_digest(self.lengths)

    def num_tokens(self, epoch: int) -> int:
        groups = (group for window in self.windows(epoch) for group in self._split(window))
        return sum(len(group) * max(self.lengths[i] for i in group) for group in groups)

    def _split(self, window: list[int]) -> list[list[int]]:
        """Returns the groups of a window, most expensive first; neighbours share a slot."""
        ordered = sorted(window, key=self.lengths.__getitem__, reverse=True)
        sizes = balanced_sizes([self.lengths[i] for i in ordered], min(self.num_groups, len(ordered)))
        groups = []
        start = 0
        for size in sizes:
            groups.append(ordered[start : start + size])
            start += size
        return sorted(groups, key=lambda group: -cost(len(group), self.lengths[group[0]]))


class _OfAllProcesses(BatchOrder):
    """The groups of all processes in turn, each sample once; with one process, all of them are its own."""

    def __init__(self, sampler: BatchRebalanceSampler) -> None:
        super().__init__()
        self.sampler = sampler
        self.seed = sampler.seed
        self.unit = sampler.unit
        self.num_samples = sampler.num_samples

    def __len__(self) -> int:
        of = self.sampler
        return of._full * of.num_groups + min(of._rest, of.num_groups)

    def indices(self, epoch: int) -> Iterable[list[int]]:
        self.sampler.seed = self.seed
        for window in self.sampler.windows(epoch):
            yield from self.sampler._split(window)

    def describe(self) -> OrderKind:
        return self.sampler.describe()

    def num_tokens(self, epoch: int) -> int:
        return self.sampler.num_tokens(epoch)


def cost(num_samples: int, longest: int) -> float:
    """Cost of a micro-batch, padded to its longest sample."""
    return num_samples * (longest + ATTENTION_COST * longest * longest)


def balanced_sizes(lengths: Sequence[int], num_groups: int) -> list[int]:
    """Returns sizes of consecutive groups of samples, longest first, that minimize the greatest cost."""
    unit = [cost(1, length) for length in lengths]
    low = unit[0]
    high = cost(len(lengths), lengths[0])
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if len(_fill(unit, middle)) <= num_groups:
            high = middle
        else:
            low = middle
    return _level(unit, num_groups, bound=high * (1 + 1e-9))


def _fill(unit: Sequence[float], bound: float) -> list[int]:
    """Returns the sizes of groups that are filled one after another as far as the bound allows."""
    sizes = []
    start = 0
    while start < len(unit):
        size = max(int(bound / unit[start]), 1) if unit[start] else len(unit)
        sizes.append(min(size, len(unit) - start))
        start += sizes[-1]
    return sizes


def _level(unit: Sequence[float], num_groups: int, *, bound: float) -> list[int]:
    """Returns sizes of exactly `num_groups` groups within the bound, the others near the mean of the remaining cost."""
    needed = _needed(unit, bound)
    sizes = []
    start = 0
    for group in range(num_groups):
        left = len(unit) - start
        groups_after = num_groups - group - 1
        if groups_after == 0:
            sizes.append(left)
            break
        most = min(max(int(bound / unit[start]), 1), left - groups_after)
        wished = round(sum(unit[start:]) / (groups_after + 1) / unit[start])
        size = min(max(wished, 1), most)
        while size < most and needed[start + size] > groups_after:
            size += 1  # otherwise the remaining samples would not fit into the remaining groups
        sizes.append(size)
        start += size
    return sizes


def _needed(unit: Sequence[float], bound: float) -> list[int]:
    """Groups that the samples from each position on need, filled as `_fill` does; one entry more for the end."""
    needed = [0] * (len(unit) + 1)
    for start in range(len(unit) - 1, -1, -1):
        size = max(int(bound / unit[start]), 1) if unit[start] else len(unit)
        needed[start] = 1 + needed[min(start + size, len(unit))]
    return needed
