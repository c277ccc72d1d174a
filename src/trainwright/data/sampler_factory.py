"""Makes orders of training samples: the order of a plan, and the order of a checkpoint's epoch."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler

from trainwright._types import DatasetLike, has_length
from trainwright.capability_table import BATCHING_FIELDS
from trainwright.config.plans import LoaderPlan, MixturePlan, SamplingPlan
from trainwright.data.batcher import find_batcher
from trainwright.data.cursor import Cursor, OrderKind, is_same_order, raise_another_order
from trainwright.data.length_sampler import (
    LengthGroupedSampler,
    Lengths,
    SortedByLength,
    lengths_digest,
    sample_lengths,
)
from trainwright.data.mixture import MixtureDataset
from trainwright.data.order import FeistelOrder, Order, SamplerOrder, ShuffledOrder
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
    if isinstance(dataset, MixtureDataset) and dataset.curriculum is not None:
        return dataset.curriculum.make_order(dataset, seed=plan.seed, shuffles=plan.strategy != "sequential")
    if plan.mixture is not None:
        return _by_shares(dataset, plan, plan.mixture)
    batcher = find_batcher(plan)
    if batcher is not None:
        return batcher.make_order(_lengths(dataset, plan), seed=plan.seed, drop_last=plan.drop_last)
    if plan.strategy == "sequential":
        return current("SequentialSampler", SequentialSampler)(dataset)
    if plan.strategy == "group_by_length":
        batch_size = plan.batch_size * plan.micro_batches
        lengths = _lengths(dataset, plan)
        return _length_grouped(batch_size, lengths, entry=plan.length_of, column=plan.length_column)
    if plan.strategy == "batch_rebalance":
        from trainwright.data.balanced_batches import BatchRebalanceSampler

        return current("BatchRebalanceSampler", BatchRebalanceSampler)(
            _lengths(dataset, plan).tolist(),
            plan.batch_size * plan.micro_batches * plan.num_processes,
            dp_size=plan.num_processes,
            grad_accum=plan.micro_batches,
            seed=plan.seed,
            drop_last=plan.drop_last,
        )
    return current("RandomSampler", RandomSampler)(dataset)


def _by_shares(dataset: MixtureDataset, plan: SamplingPlan, mixture: MixturePlan) -> Sampler[Any]:
    from trainwright.data.mixture_order import mixture_order

    batcher = find_batcher(plan)
    lengths = _lengths(dataset, plan) if batcher is not None or mixture.unit == "tokens" else None
    if batcher is None or lengths is None:
        return mixture_order(dataset, mixture, seed=plan.seed, shuffles=plan.strategy != "sequential", lengths=lengths)
    from trainwright.data.mixture_batches import MixtureBatches

    example = batcher.make_order(lengths, seed=0, drop_last=False)
    in_step = round(len(dataset) / len(example) * plan.micro_batches * plan.num_processes)
    order = mixture_order(
        dataset, replace(mixture, samples_per_step=max(in_step, 1)), seed=plan.seed, shuffles=True, lengths=lengths
    )
    return MixtureBatches(order, lengths, batcher, example)


def evaluation_by_length(dataset: DatasetLike, plan: SamplingPlan, generator: torch.Generator) -> LengthGroupedSampler:
    """Returns evaluation samples with similar lengths together, in an order drawn by `generator`."""
    make_sampler = current("LengthGroupedSampler", LengthGroupedSampler)
    sampler = make_sampler(plan.batch_size, lengths=_lengths(dataset, plan), generator=generator)
    sampler.length_column = plan.length_column
    return sampler


def sorted_evaluation(dataset: DatasetLike, plan: SamplingPlan) -> SortedByLength:
    """Returns evaluation samples, longest first."""
    return SortedByLength(_lengths(dataset, plan))


def stream_former(dataset: object, plan: SamplingPlan) -> BatchFormer | None:
    """Returns the former of batches by length for a stream; None if the plan does not ask for it."""
    if isinstance(dataset, IterableDataset) and hasattr(dataset, "use") and hasattr(dataset, "names"):
        _use_shares(dataset, plan)
    if not isinstance(dataset, IterableDataset) or find_batcher(plan) is None:
        return None
    from trainwright.data.streaming.lookahead_buffer import BatchFormer

    return BatchFormer(plan)


def _use_shares(dataset: IterableDataset[Any], plan: SamplingPlan) -> None:
    """Sets the order of the sources of a `MixtureStream`."""
    from trainwright.data.mixture_order import ShareCurve, curve_of_streams, settings_of
    from trainwright.data.streaming.mixture_stream import MixtureStream

    if isinstance(dataset, MixtureStream):
        curve = None if plan.mixture is None else curve_of_streams(dataset.names, plan.mixture)
        settings = "" if plan.mixture is None else settings_of(plan.mixture)
        shuffles = plan.strategy != "sequential"
        dataset.use(curve, settings=settings, read=ShareCurve.from_json, seed=plan.seed, shuffles=shuffles)


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


def order_of_checkpoint(cursor: Cursor, now: OrderKind, *, num_samples: int, dataset: DatasetLike) -> Order:
    """Returns the order in which a checkpoint's epoch was begun; DataError if this data cannot reproduce it."""
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
    elif seed is not None and before["kind"] == "mixture" and isinstance(dataset, MixtureDataset):
        from trainwright.data.mixture_order import order_again

        order = order_again(before, dataset, num_samples=num_samples, seed=seed)
    elif seed is not None and before["kind"] in ("permutation", "feistel_permutation"):
        order = (ShuffledOrder if before["kind"] == "permutation" else FeistelOrder)(num_samples, seed)
    if order is None or now["kind"] not in _SINGLE or len(order) != num_samples:
        raise_another_order(cursor, now)
    if not is_same_order(before, order.describe()):
        raise_another_order(cursor, order.describe())
    return order


_SINGLE = (
    "sequence",
    "random_sampler",
    "length_grouping",
    "permutation",
    "feistel_permutation",
    "sampler",
    "mixture",
    "curriculum",
)


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


def _lengths(dataset: DatasetLike, plan: SamplingPlan) -> Lengths:
    return sample_lengths(dataset, plan.length_of, column=plan.length_column, show_progress=plan.show_progress)
