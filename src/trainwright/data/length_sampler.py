"""Samplers that put samples of similar length together. Where lengths come from is in lengths.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler

from trainwright._types import DatasetLike
from trainwright.data.lengths import Lengths, sample_lengths


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
