"""Lengths of samples, and orders in which samples of similar length are neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from trainwright.errors import DataError


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
