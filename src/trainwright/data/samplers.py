"""Orders of samples, and batches of indices from them that can start anywhere.

The shuffled order of an epoch is a pure function of (seed, epoch): the permutation that a fresh torch generator with
seed + epoch draws. A resume computes it and starts in the middle; nothing is read or drawn to get there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler

from trainwright.data.workers import SeededIndices
from trainwright.errors import DataError


class Order(Protocol):
    """The indices of an epoch, in order."""

    def indices(self, epoch: int) -> Iterable[int]: ...
    def __len__(self) -> int: ...


class ShuffledOrder:
    """A new permutation for each epoch, drawn from `seed + epoch`."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def indices(self, epoch: int) -> Iterable[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()


class SamplerOrder:
    """The order that a sampler gives; it may draw from the random generators of this process when an epoch starts."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def indices(self, epoch: int) -> Iterable[int]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return self.sampler  # type: ignore[no-any-return]


class EpochBatches(Sampler[list[int]]):
    """Batches of indices for one epoch at a time; `seek` says which epoch and where in it.

    Args:
        order: gives the indices of an epoch.
        batch_size: indices per batch.
        drop_last: leave out a last batch that is smaller.
        worker_seed: base of the seeds that workers get with each batch; None leaves them alone.
        rank, num_processes: of N processes, this one gets batches rank, rank + N, ... of all; the samples that are
            left when not every process can get a full batch are split between them.
    """

    def __init__(
        self,
        order: Order,
        batch_size: int,
        *,
        drop_last: bool = False,
        worker_seed: int | None = None,
        rank: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.worker_seed = worker_seed
        self.rank = rank
        self.num_processes = num_processes
        self.epoch = 0
        self.first_sample = 0
        self._drawn: Iterator[int] | None = None

    @property
    def sampler(self) -> Any:
        """What the order was made from; torch's DataLoader and others look for it here."""
        return getattr(self.order, "sampler", self.order)

    def seek(self, epoch: int, first_sample: int = 0) -> None:
        self.epoch = epoch
        self.first_sample = first_sample

    def set_epoch(self, epoch: int) -> None:
        self.seek(epoch)

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.round_size)
        return full + int(rest > 0 and not self.drop_last)

    @property
    def round_size(self) -> int:
        """Samples of one batch on each process."""
        return self.batch_size * self.num_processes

    def draw(self) -> None:
        """Draws the order of the epoch now, not with the first batch: random states may be set in between."""
        self._drawn = iter(list(self.order.indices(self.epoch)))

    def __iter__(self) -> Iterator[list[int]]:
        order, self._drawn = self._drawn or iter(self.order.indices(self.epoch)), None
        indices = itertools.islice(order, self.first_sample, None)
        epoch, number = self.epoch, self.first_sample // self.round_size
        self.epoch, self.first_sample = epoch + 1, 0  # a plain `for` loop over epochs gets a new order each time
        while together := list(itertools.islice(indices, self.round_size)):
            if len(together) < self.round_size and self.drop_last:
                return
            batch = self._share(together)
            yield batch if self.worker_seed is None else SeededIndices(batch, (self.worker_seed, epoch, number))
            number += 1

    def _share(self, together: list[int]) -> list[int]:
        """This process's part of the samples of a round."""
        if self.num_processes == 1:
            return together
        size, more = divmod(len(together), self.num_processes)
        first = self.rank * size + min(self.rank, more)
        return together[first : first + size + int(self.rank < more)] or together[-1:]


def get_length_grouped_indices(
    lengths: Sequence[int], batch_size: int, mega_batch_mult: int | None = None, generator: Any = None
) -> list[int]:
    """A random order in which neighbours have similar lengths.

    A random permutation is cut into portions of `mega_batch_mult` batches (default 50, or as many as give four
    portions, whichever is less) and each is sorted, longest first. The longest sample of all comes first, so that
    too little memory shows at once.
    """
    num = len(lengths)
    if mega_batch_mult is None:
        mega_batch_mult = max(min(num // (batch_size * 4), 50), 1)
    size = mega_batch_mult * batch_size
    shuffled = torch.randperm(num, generator=generator)
    portions = [
        sorted(shuffled[i : i + size].tolist(), key=lengths.__getitem__, reverse=True) for i in range(0, num, size)
    ]
    longest = max(range(len(portions)), key=lambda i: lengths[portions[i][0]])
    portions[0][0], portions[longest][0] = portions[longest][0], portions[0][0]
    return list(itertools.chain.from_iterable(portions))


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
        dataset: Any = None,
        lengths: Any = None,
        model_input_name: str | None = None,
        generator: Any = None,
    ) -> None:
        if dataset is None and lengths is None:
            raise ValueError("LengthGroupedSampler needs the lengths, or a dataset to ask for them; both are None.")
        self.batch_size = batch_size
        if lengths is None:
            lengths = lengths_of(dataset, model_input_name or "input_ids")
        self.lengths: list[int] = lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=self.generator))


def lengths_of(dataset: Any, name: str) -> list[int]:
    """Length of the entry `name` of each item, asked by index."""
    lengths = []
    for index in range(len(dataset)):
        item = dataset[index]
        if not isinstance(item, Mapping) or name not in item:
            has = ", ".join(sorted(item)) if isinstance(item, Mapping) else f"a {type(item).__name__}"
            raise DataError(
                f"Grouping by length needs the length of {name!r}, and item {index} has {has}. Give the dataset a "
                "column with the lengths (length_column_name), or a processing_class whose first model input it has."
            )
        lengths.append(len(item[name]))
    return lengths
