"""Which order a training gets: from its plan to a sampler. The orders themselves are in files of their own."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler

from trainwright._types import has_length
from trainwright.config.plans import SamplingPlan
from trainwright.data.balanced_batches import BatchRebalanceSampler
from trainwright.data.length_sampler import LengthGroupedSampler
from trainwright.data.lengths import Lengths, sample_lengths
from trainwright.data.streaming.batching import BatchFormer, formed_by_length
from trainwright.errors import DataError


def training_order(dataset: Any, plan: SamplingPlan) -> Sampler[Any] | None:
    """The sampler that the plan asks for; None for a stream, which has its own order.

    Raises:
        DataError: batches are to be formed by length, and nobody knows how long the samples are.
    """
    if dataset is None or not has_length(dataset) or isinstance(dataset, IterableDataset):
        if plan.forms_batches and dataset is not None:
            raise DataError(
                f"The training data is a {type(dataset).__name__} that is read as a stream, and batches cannot be "
                "formed by the lengths of samples that are not known. Use a dataset with a length, or drop "
                "max_tokens_per_batch, packing or train_sampling_strategy='batch_rebalance'."
            )
        return None
    if plan.max_tokens is not None or plan.row_length is not None:
        return formed_by_length(_lengths(dataset, plan), plan, seed=plan.seed, drop_last=plan.drop_last)
    if plan.strategy == "sequential":
        return SequentialSampler(dataset)
    if plan.strategy == "group_by_length":
        return LengthGroupedSampler(plan.batch_size * plan.micro_batches, lengths=_lengths(dataset, plan).tolist())
    if plan.strategy == "batch_rebalance":
        return _rebalanced(dataset, plan)
    return RandomSampler(dataset)


def stream_former(dataset: Any, plan: SamplingPlan) -> BatchFormer | None:
    """What forms batches of a stream by length; None where nobody asked."""
    asked = plan.max_tokens is not None or plan.row_length is not None
    return BatchFormer(plan) if asked and isinstance(dataset, IterableDataset) else None


def _rebalanced(dataset: Any, plan: SamplingPlan) -> BatchRebalanceSampler:
    return BatchRebalanceSampler(
        _lengths(dataset, plan).tolist(),
        plan.batch_size * plan.micro_batches * plan.num_processes,
        dp_size=plan.num_processes,
        grad_accum=plan.micro_batches,
        seed=plan.seed,
        drop_last=plan.drop_last,
    )


def _lengths(dataset: Any, plan: SamplingPlan) -> Lengths:
    return sample_lengths(dataset, plan.length_of, column=plan.length_column, show_progress=plan.show_progress)
