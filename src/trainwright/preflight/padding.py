"""Cost of padding: tokens and seconds per step for each way to form batches, from the lengths of samples alone.

A step of B samples in one batch computes B x longest tokens. The same samples, sorted by length and split into
micro-batches (`train_sampling_strategy="batch_rebalance"`), have less padding in total, but each micro-batch has a
fixed cost. The model of the time of a step is

    seconds = per_step_s + micro-batches x per_batch_s + tokens x per_token_s        padding counts as tokens

Worked example: lengths 48 30 20 10, and costs of 5, 10 and 1. One batch takes 5 + 10 + 4 x 48 = 207; two batches
(48) (30 20 10) take 5 + 2 x 10 + 48 + 3 x 30 = 163.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainwright._types import JSONObject
from trainwright.config.plans import SamplingPlan
from trainwright.data.balanced_batches import BatchRebalanceSampler
from trainwright.data.batcher import BatchSuggestion, PaddedBatches, find_batcher, suggest_batches
from trainwright.data.length_sampler import BatchOrder, get_length_grouped_indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Lengths = NDArray[np.int64]

PARTS = (2, 4, 8, 16)  # numbers of micro-batches that a batch may be split into
NUM_STEPS = 32  # steps over which tokens are averaged, at most
SIMILAR = 0.03  # a split with fewer micro-batches is preferred if it is slower by less than this


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step, forward and backward."""

    per_step_s: float
    per_batch_s: float  # for each micro-batch
    per_token_s: float  # for each token, padding included

    @classmethod
    def through(cls, one_s: float, two_s: float, large_s: float, *, tokens: int, large_tokens: int) -> StepCost:
        """Derives the costs from the times of three steps.

        These are a step of one and of two batches of `tokens`, and a step of one batch of `large_tokens`.
        """
        token_s = max((large_s - one_s) / max(large_tokens - tokens, 1), 0.0)
        batch_s = min(max(two_s - one_s - token_s * tokens, 0.0), one_s)
        return cls(max(one_s - batch_s - token_s * tokens, 0.0), batch_s, token_s)

    def seconds(self, num_batches: float, num_tokens: float, num_steps: float = 1.0) -> float:
        return num_steps * self.per_step_s + num_batches * self.per_batch_s + num_tokens * self.per_token_s


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Micro-batches of a step, and its time relative to no split."""

    num_groups: int
    ratio: float


@dataclass(frozen=True, slots=True)
class OtherBatches:
    """Settings with other samples in a step, and the relative time of an epoch with them."""

    name: str
    settings: JSONObject
    ratio: float
    note: str = ""  # other changes to make


def pads_to_any_length(collator: object) -> bool:
    """Returns whether a collator, like transformers', pads to the longest sample and has a multiple to set."""
    is_made_of_fields = dataclasses.is_dataclass(collator) and not isinstance(collator, type)
    return is_made_of_fields and getattr(collator, "pad_to_multiple_of", 0) is None


def to_multiples(collator: Any, multiple: int) -> Any:
    """Returns a copy of a collator that pads to multiples of a number of tokens; others are unchanged."""
    if not pads_to_any_length(collator):
        return collator
    padding = copy.copy(collator)  # not `dataclasses.replace`, which would run the constructor once more
    padding.pad_to_multiple_of = multiple
    return padding


def plain_tokens(lengths: Lengths, batch_size: int) -> float:
    """Mean tokens of a batch of `batch_size` samples in the order of `lengths`, padding included."""
    usable = lengths[: len(lengths) // batch_size * batch_size].reshape(-1, batch_size)
    return float(batch_size * usable.max(axis=1).mean())


def step_tokens(lengths: Lengths, batch_size: int, micro_batches: int, processes: int) -> float:
    """Mean tokens of a step on the process that has the most, padding included; samples in the order of `lengths`."""
    window = batch_size * micro_batches * processes
    usable = lengths[: len(lengths) // window * window].reshape(-1, micro_batches, processes, batch_size)
    return float(batch_size * usable.max(axis=3).sum(axis=1).max(axis=1).mean())


def split_tokens(lengths: Lengths, window: int, num_groups: int, processes: int) -> float:
    """Mean tokens of a step of `window` samples that is split by length into `num_groups` on each process.

    The first process counts: it gets the most expensive group of each slot, and the others wait for it.
    """
    num_steps = min(len(lengths) // window, NUM_STEPS)
    some: list[int] = lengths[: num_steps * window].tolist()
    order = BatchRebalanceSampler(some, window, processes, num_groups, shuffle=False)
    return sum(len(group) * max(some[i] for i in group) for group in order.indices(0)) / num_steps


def best_split(
    lengths: Lengths, *, batch_size: int, micro_batches: int, cost: StepCost, processes: int = 1
) -> BatchSplit | None:
    """Returns the fastest split of a step; None if no split is faster.

    Args:
        lengths: lengths of samples in random order, for at least one step.
        batch_size: samples of a micro-batch.
        micro_batches: micro-batches of a step on each process, before the split.
        cost: cost of a micro-batch.
        processes: processes that share the samples of a step; it takes as long as the slowest of them.
    """
    window = batch_size * micro_batches * processes
    plain_s = cost.seconds(micro_batches, step_tokens(lengths, batch_size, micro_batches, processes))
    found = [BatchSplit(micro_batches, 1.0)]
    for parts in PARTS:
        if batch_size % parts == 0 and batch_size > parts:
            num_groups = micro_batches * parts
            seconds = cost.seconds(num_groups, split_tokens(lengths, window, num_groups, processes))
            found.append(BatchSplit(num_groups, seconds / plain_s if plain_s else 1.0))
    least = min(split.ratio for split in found)
    chosen = next(split for split in found if split.ratio <= least + SIMILAR)
    return None if chosen.num_groups == micro_batches else chosen


def other_batches(
    lengths: Lengths, *, batch_size: int, micro_batches: int, cost: StepCost, can_join_samples: bool
) -> list[OtherBatches]:
    """Returns ways to form batches that change the samples of a step.

    `can_join_samples`: the model may take several samples in a row.
    """
    num = len(lengths) // batch_size * batch_size
    lengths = lengths[:num]

    def seconds(num_batches: int, num_tokens: float) -> float:
        return cost.seconds(num_batches, num_tokens, num_batches / micro_batches)

    plain_s = seconds(num // batch_size, plain_tokens(lengths, batch_size) * num / batch_size)

    def share(num_batches: int, num_tokens: float) -> float:
        return seconds(num_batches, num_tokens) / plain_s if plain_s else 1.0

    generator = torch.Generator().manual_seed(0)
    grouped = get_length_grouped_indices(lengths.tolist(), batch_size * micro_batches, generator=generator)
    tokens = plain_tokens(lengths[grouped], batch_size) * num / batch_size
    settings: JSONObject = {"train_sampling_strategy": "group_by_length"}
    found = [OtherBatches("grouping by length", settings, share(num // batch_size, tokens))]
    padded = PaddedBatches(
        batch_size=batch_size,
        longest_tokens=int(lengths.max()),
        mean_tokens=float(lengths.mean()),
        can_join_samples=can_join_samples,
    )
    for suggested in suggest_batches(padded):
        order = _form_batches(lengths, suggested)
        ratio = share(len(order), order.num_tokens(0))
        found.append(OtherBatches(suggested.name, suggested.settings, ratio, suggested.note))
    return found


def _form_batches(lengths: Lengths, suggested: BatchSuggestion) -> BatchOrder:
    plan = SamplingPlan(
        strategy="random",
        batch_size=suggested.batch_size,
        micro_batches=1,
        num_processes=1,
        seed=0,
        batching=suggested.batching,
    )
    batcher = find_batcher(plan)
    assert batcher is not None, "a batcher forms what it suggests"
    return batcher.make_order(lengths, seed=0, drop_last=False)
