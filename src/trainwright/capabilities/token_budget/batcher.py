"""BudgetBatcher: forms batches of samples of similar length, with a limit of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainwright.capabilities.token_budget.plan import BudgetPlan, plan_budget
from trainwright.config.plans import SamplingPlan
from trainwright.data.batcher import Batcher, BatchSuggestion, PaddedBatches, round_tokens
from trainwright.data.cursor import OrderKind
from trainwright.data.length_sampler import BatchOrder, Lengths, check_lengths, lengths_digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASS_WIDTH = 1 / 16  # lengths within this ratio are drawn together
CURE = "Raise the budget, or truncate the samples."


@dataclass(frozen=True, slots=True)
class BudgetBatcher(Batcher):
    """Batches of up to `max_tokens` tokens."""

    plan: SamplingPlan
    budget: BudgetPlan

    @property
    def setting(self) -> str:
        return "max_tokens_per_batch"

    @property
    def limit(self) -> int:
        return self.budget.max_tokens

    @property
    def cure(self) -> str:
        return CURE

    @property
    def splits_long(self) -> bool:
        return False

    @property
    def packed_input(self) -> None:
        return None

    def make_order(self, lengths: Sequence[int] | Lengths, *, seed: int, drop_last: bool) -> TokenBudget:
        return TokenBudget(lengths, self.limit, seed=seed, multiple_of=self.plan.pad_to)


def find_batcher(plan: SamplingPlan) -> BudgetBatcher | None:
    """Returns the batcher of a plan with a budget; None for another plan."""
    return BudgetBatcher(plan, plan.batching) if isinstance(plan.batching, BudgetPlan) else None


def suggest_batches(padded: PaddedBatches) -> BatchSuggestion:
    """Returns the budget with as many tokens in a batch as the samples have now, without padding."""
    budget = round_tokens(max(padded.batch_size * padded.mean_tokens, padded.longest_tokens))
    return BatchSuggestion(
        name="token budget",
        settings={"max_tokens_per_batch": budget},
        batching=plan_budget(budget),
        note="instead of per_device_train_batch_size; ",
    )


class TokenBudget(BatchOrder):
    """Batches of up to `max_tokens` tokens per process, padding included; a longer sample is a DataError.

    The samples are sorted by length, longest first, and cut: a batch that begins with a sample of length L takes N // L
    samples. To vary the company of samples from epoch to epoch, lengths that differ by less than a sixteenth are
    treated as the longest of them, and the order within such a class is drawn again. The cuts depend on the classes
    alone, so every epoch has the same number of batches. The order of batches is drawn, too. The collator pads to a
    multiple of `multiple_of`.

    Worked example: N = 32, lengths 16 9 8 4 4 4 (all classes of their own but the 4s): batches (16 9) (8 4 4 4), which
    are 2 x 16 = 32 and 4 x 8 = 32 tokens with padding.
    """

    def __init__(
        self, lengths: Sequence[int] | Lengths, max_tokens: int, *, seed: int, multiple_of: int | None = None
    ) -> None:
        super().__init__()
        checked = check_lengths(lengths, max_tokens, setting="max_tokens_per_batch", cure=CURE)
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
    """Returns for each sample the length of its class, which is the longest length in it."""
    tops: list[int] = []
    for length in np.unique(lengths)[::-1].tolist():
        if not tops or length <= tops[-1] * (1 - CLASS_WIDTH):
            tops.append(length)
    ascending: NDArray[np.int64] = np.array(tops[::-1], dtype=np.int64)
    return ascending[np.searchsorted(ascending, lengths)]


def _cuts(widths: Lengths, max_tokens: int) -> NDArray[np.int64]:
    """Returns the start positions of batches in samples sorted by width, widest first."""
    starts = []
    position = 0
    while position < len(widths):
        starts.append(position)
        position += max(max_tokens // int(widths[position]), 1)
    return np.array(starts, dtype=np.int64)
