"""Batches of as many samples as a budget of tokens allows, padding included; samples of similar length together.

The samples are sorted by length, longest first, and cut: a batch that begins with a sample of length L takes N // L of
them. So that they change their company from epoch to epoch, lengths that differ by less than a sixteenth count as the
longest of them, and within such a class the order is drawn anew. The cuts depend on the classes alone: every epoch has
the same number of batches. Their order is drawn, too.

Worked example: N = 32, lengths 16 9 8 4 4 4 (all classes of their own but the 4s): batches (16 9) (8 4 4 4), which are
2 x 16 = 32 and 4 x 8 = 32 tokens with padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainwright.data.batch_sampler import BatchOrder
from trainwright.data.cursor import OrderKind
from trainwright.data.length_sampler import Lengths, check_lengths, lengths_digest

CLASS_WIDTH = 1 / 16


class TokenBudget(BatchOrder):
    """Batches of up to `max_tokens` tokens on one process, padding included; a longer sample is a DataError.

    The collator pads to a multiple of `multiple_of` tokens.
    """

    def __init__(
        self, lengths: Sequence[int] | Lengths, max_tokens: int, *, seed: int, multiple_of: int | None = None
    ) -> None:
        super().__init__()
        cure = "Raise the budget, or cut the samples."
        checked = check_lengths(lengths, max_tokens, setting="max_tokens_per_batch", cure=cure)
        multiple = multiple_of or 1
        self._padded: NDArray[np.int64] = -(-checked // multiple) * multiple
        self.seed = seed
        self.num_samples = len(checked)
        self.unit = f"max_tokens_per_batch={max_tokens}"
        self._pad_to = multiple_of
        self._classes = _classes(self._padded)
        self._starts = _cuts(np.sort(self._classes)[::-1], max_tokens)

    def __len__(self) -> int:
        return len(self._starts)

    def indices(self, epoch: int) -> Iterable[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        drawn = torch.randperm(self.num_samples, generator=generator).numpy()
        order = drawn[np.argsort(-self._classes[drawn], kind="stable")]
        ends = np.append(self._starts[1:], self.num_samples)
        for batch in torch.randperm(len(self), generator=generator).tolist():
            yield order[self._starts[batch] : ends[batch]].tolist()

    def describe(self) -> OrderKind:
        lengths = lengths_digest(self._padded)
        return {"kind": "token_budget", "unit": self.unit, "pad_to": self._pad_to, "lengths": lengths}

    def num_tokens(self, epoch: int) -> int:
        return sum(len(batch) * int(self._padded[batch].max()) for batch in self.indices(epoch))


def _classes(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each sample the length of its class: the longest one in it."""
    tops: list[int] = []
    for length in np.unique(lengths)[::-1].tolist():
        if not tops or length <= tops[-1] * (1 - CLASS_WIDTH):
            tops.append(length)
    ascending = np.array(tops[::-1], dtype=np.int64)
    classes: NDArray[np.int64] = ascending[np.searchsorted(ascending, lengths)]
    return classes


def _cuts(widths: Lengths, max_tokens: int) -> NDArray[np.int64]:
    """Returns the first positions of batches in samples sorted by width, widest first."""
    starts, position = [], 0
    while position < len(widths):
        starts.append(position)
        position += max(max_tokens // int(widths[position]), 1)
    return np.array(starts, dtype=np.int64)
