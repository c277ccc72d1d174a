"""Makes orders of training samples: the order of a plan, and the order of a checkpoint's epoch."""

from __future__ import annotations

from collections.abc import Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from trainwright._types import DatasetLike, has_length
from trainwright.capability_table import BATCHING_FIELDS
from trainwright.config.plans import LoaderPlan, SamplingPlan
from trainwright.data.batcher import find_batcher
from trainwright.data.cursor import Cursor, OrderKind, is_same_order, raise_another_order
from trainwright.data.length_sampler import (
    LengthGroupedSampler,
    Lengths,
    SortedByLength,
    lengths_digest,
    sample_lengths,
)
from trainwright.data.order import FeistelOrder, Order, SamplerOrder, ShuffledOrder
from trainwright.data.sources import SourceStream, list_handlers
from trainwright.errors import DataError
from trainwright.support.replaced import current

if TYPE_CHECKING:
    from trainwright.data.streaming.lookahead_buffer import BatchFormer

LARGE = 2**24  # samples above which "auto" computes the shuffled order: an array of indices takes over 128 MiB

# Any: datasets and samplers are the user's own types.


def training_order(dataset: DatasetLike, plan: SamplingPlan) -> Sampler[Any] | None:
    """Returns the sampler for a plan; None for a stream, which cannot form batches by length here (DataError)."""
    if dataset is None or not has_length(dataset) or isinstance(dataset, IterableDataset):
        if dataset is not None and find_batcher(plan) is not None:
            raise DataError(
                f"The training data is a {type(dataset).__name__}, which is read as a stream, and batches cannot be "
                "formed by the lengths of unknown samples. Use a dataset with a length, or drop "
                f"{' or '.join(BATCHING_FIELDS)}."
            )
        return None
    for handler in list_handlers():
        order = handler.make_order(dataset, plan)
        if order is not None:
            return order
    batcher = find_batcher(plan)
    if batcher is not None:
        return batcher.make_order(measure_lengths(dataset, plan), seed=plan.seed, drop_last=plan.drop_last)
    if plan.strategy == "sequential":
        return current("SequentialSampler", SequentialSampler)(dataset)
    if plan.strategy == "group_by_length":
        batch_size = plan.batch_size * plan.micro_batches
        lengths = measure_lengths(dataset, plan)
        return _length_grouped(batch_size, lengths, entry=plan.length_of, column=plan.length_column)
    if plan.strategy == "batch_rebalance":
        from trainwright.data.balanced_batches import BatchRebalanceSampler

        return current("BatchRebalanceSampler", BatchRebalanceSampler)(
            measure_lengths(dataset, plan).tolist(),
            plan.batch_size * plan.micro_batches * plan.num_processes,
            dp_size=plan.num_processes,
            grad_accum=plan.micro_batches,
            seed=plan.seed,
            drop_last=plan.drop_last,
        )
    return current("RandomSampler", RandomSampler)(dataset)


def evaluation_by_length(dataset: DatasetLike, plan: SamplingPlan, generator: torch.Generator) -> LengthGroupedSampler:
    """Returns evaluation samples with similar lengths together, in an order drawn by `generator`."""
    make_sampler = current("LengthGroupedSampler", LengthGroupedSampler)
    sampler = make_sampler(plan.batch_size, lengths=measure_lengths(dataset, plan), generator=generator)
    sampler.length_column = plan.length_column
    return sampler


def sorted_evaluation(dataset: DatasetLike, plan: SamplingPlan) -> SortedByLength:
    """Returns evaluation samples, longest first."""
    return SortedByLength(measure_lengths(dataset, plan))


def stream_former(dataset: object, plan: SamplingPlan) -> BatchFormer | None:
    """Returns the former of batches by length for a stream; None if the plan does not ask for it."""
    if isinstance(dataset, SourceStream):
        for handler in list_handlers():
            handler.order_stream(dataset, plan)
    if not isinstance(dataset, IterableDataset) or find_batcher(plan) is None:
        return None
    from trainwright.data.streaming.lookahead_buffer import BatchFormer

    return BatchFormer(plan)


def order_by(sampler: Any, dataset: Sized, plan: LoaderPlan) -> Order:
    """Returns the order of single samples for the sampler returned by the trainer's hook.

    A RandomSampler means the shuffled order, None the dataset's own order; a batch sampler is a DataError.
    """
    if isinstance(sampler, Order):
        return sampler
    if isinstance(sampler, BatchSampler):
        raise DataError(
            f"The sampler is a batch sampler ({type(sampler).__name__}), which yields whole batches, but "
            f"per_device_train_batch_size={plan.batch_size} also sets the batch size. Return a sampler of single "
            "indices, or override get_train_dataloader and return DataLoader(dataset, batch_sampler=...)."
        )
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset):
        num = len(dataset)
        if not plan.seeded:
            return SamplerOrder(sampler, lambda: {"kind": "random_sampler"})
        is_large = plan.shuffle_method == "auto" and num > LARGE
        kind = FeistelOrder if plan.shuffle_method == "feistel" or is_large else ShuffledOrder
        return kind(num, plan.seed)
    if sampler is None or type(sampler) is SequentialSampler:
        return SamplerOrder(range(len(dataset)) if sampler is None else sampler, lambda: {"kind": "sequence"})
    if type(sampler) is LengthGroupedSampler and sampler.generator is None:
        return SamplerOrder(sampler, partial(_length_grouping, sampler))
    return SamplerOrder(sampler)


def reopen_order(
    cursor: Cursor, now: OrderKind, *, forms_groups: bool, num_samples: int, dataset: DatasetLike
) -> Order:
    """Returns the order in which a checkpoint's epoch was begun; DataError if this data cannot reproduce it.

    An order that `forms_groups` of samples cannot finish an epoch of single ones.
    """
    assert cursor.order is not None
    before = cursor.order
    seed = cursor.seed
    order: Order | None = None
    if before["kind"] == "sequence":
        order = SamplerOrder(range(num_samples), lambda: {"kind": "sequence"})
    elif before["kind"] == "random_sampler":
        order = SamplerOrder(RandomSampler(range(num_samples)), lambda: {"kind": "random_sampler"})
    elif before["kind"] == "length_grouping":
        order = _length_grouped_again(before, dataset)
    elif seed is not None and before["kind"] in ("permutation", "feistel_permutation"):
        order = (ShuffledOrder if before["kind"] == "permutation" else FeistelOrder)(num_samples, seed)
    elif seed is not None:
        found = (one.restore_order(before, dataset, num_samples=num_samples, seed=seed) for one in list_handlers())
        order = next((one for one in found if one is not None), None)
    if order is None or forms_groups or len(order) != num_samples:
        raise_another_order(cursor, now)
    if not is_same_order(before, order.describe()):
        raise_another_order(cursor, order.describe())
    return order


def _length_grouping(sampler: LengthGroupedSampler) -> OrderKind:
    return {
        "kind": "length_grouping",
        "batch_size": sampler.batch_size,
        "entry": sampler.model_input_name,
        "column": sampler.length_column,
        "lengths": lengths_digest(sampler.lengths),
    }


def _length_grouped_again(kind: OrderKind, dataset: DatasetLike) -> Order | None:
    """Uses the dataset's lengths from the same origin; None if it has none."""
    entry = str(kind["entry"])
    column = None if kind["column"] is None else str(kind["column"])
    try:
        lengths = sample_lengths(dataset, entry, column=column)
    except (DataError, TypeError, KeyError):
        return None
    sampler = _length_grouped(int(kind["batch_size"] or 1), lengths, entry=entry, column=column)
    return SamplerOrder(sampler, partial(_length_grouping, sampler))


def _length_grouped(batch_size: int, lengths: Lengths, *, entry: str, column: str | None) -> LengthGroupedSampler:
    make_sampler = current("LengthGroupedSampler", LengthGroupedSampler)
    sampler = make_sampler(batch_size, lengths=lengths, model_input_name=entry)
    sampler.length_column = column
    return sampler


def measure_lengths(dataset: DatasetLike, plan: SamplingPlan) -> Lengths:
    """Returns the length of each sample, from the column or the entry that the plan names."""
    return sample_lengths(dataset, plan.length_of, column=plan.length_column, show_progress=plan.show_progress)
