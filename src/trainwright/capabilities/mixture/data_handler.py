"""What a mixture does with training data: a dict of datasets is read as one, in the order that shares set."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from trainwright._types import DatasetLike, has_length, is_instance_of
from trainwright.capabilities.mixture.dataset import MixtureDataset, as_mixture
from trainwright.capabilities.mixture.order import (
    ShareCurve,
    collect_settings,
    make_stream_curve,
    mixture_order,
    order_again,
)
from trainwright.capabilities.mixture.plan import MixturePlan, plan_mixture
from trainwright.capabilities.mixture.rules import parse_share
from trainwright.config.fields import get_value
from trainwright.config.plans import SamplingPlan, StepPlan
from trainwright.config.protocol import Arguments
from trainwright.data.batcher import find_batcher
from trainwright.data.cursor import OrderKind
from trainwright.data.order import Order
from trainwright.data.sampler_factory import measure_lengths
from trainwright.data.sources import DataHandler, find_data
from trainwright.errors import ArgumentError, did_you_mean

logger = logging.getLogger(__name__)

# Visits of a row in a run from which a warning is logged.
MANY_VISITS = 4.0


class MixtureHandler(DataHandler):
    """Mixes the datasets of a dict."""

    def adapt(self, dataset: DatasetLike) -> DatasetLike:
        return as_mixture(dataset)

    def check(self, args: Any, dataset: DatasetLike) -> None:
        check_mixture(args, dataset)

    def plan_order(self, args: Arguments, plan: SamplingPlan) -> MixturePlan | None:
        return plan_mixture(args, plan)

    def make_order(self, dataset: DatasetLike, plan: SamplingPlan) -> Sampler[Any] | None:
        return make_order(dataset, plan, plan.order) if isinstance(plan.order, MixturePlan) else None

    def order_stream(self, dataset: DatasetLike, plan: SamplingPlan) -> None:
        if is_instance_of(dataset, "trainwright.capabilities.mixture.stream", "MixtureStream"):
            shares = plan.order if isinstance(plan.order, MixturePlan) else None
            dataset.use(
                None if shares is None else make_stream_curve(dataset.names, shares),
                settings="" if shares is None else collect_settings(shares),
                read=ShareCurve.from_json,
                seed=plan.seed,
                shuffles=plan.strategy != "sequential",
            )

    def restore_order(self, kind: OrderKind, dataset: DatasetLike, *, num_samples: int, seed: int) -> Order | None:
        if kind["kind"] != "mixture" or not isinstance(dataset, MixtureDataset):
            return None
        return order_again(kind, dataset, num_samples=num_samples, seed=seed)

    def describe(self, args: Any, loader: Any, plan: StepPlan, *, dispatches: bool) -> list[str]:
        return describe_sources(args, loader, plan, dispatches=dispatches)


HANDLER = MixtureHandler()


def make_order(dataset: DatasetLike, plan: SamplingPlan, mixture: MixturePlan) -> Sampler[Any]:
    """Returns the order of a mixture by shares: of samples, or of the batches that a batcher forms."""
    batcher = find_batcher(plan)
    lengths = measure_lengths(dataset, plan) if batcher is not None or mixture.unit == "tokens" else None
    if batcher is None or lengths is None:
        return mixture_order(dataset, mixture, seed=plan.seed, shuffles=plan.strategy != "sequential", lengths=lengths)
    from trainwright.capabilities.mixture.batches import MixtureBatches

    example = batcher.make_order(lengths, seed=0, drop_last=False)
    in_step = round(len(dataset) / len(example) * plan.micro_batches * plan.num_processes)
    order = mixture_order(
        dataset, replace(mixture, samples_per_step=max(in_step, 1)), seed=plan.seed, shuffles=True, lengths=lengths
    )
    return MixtureBatches(order, lengths, batcher, example)


def check_mixture(args: Any, train_dataset: DatasetLike) -> None:
    """Raises ArgumentError for shares of sources that do not match the data."""
    schedule = get_value(args, "mixture_schedule")
    field = "mixture" if schedule is None else "mixture_schedule"
    shares = get_value(args, "mixture") if schedule is None else schedule[0][1]
    if shares is None or train_dataset is None:
        return
    if isinstance(train_dataset, dict):
        raise ArgumentError(
            f"{field} has no effect: get_train_dataloader is overridden and takes the dict of datasets itself. "
            f"Remove {field}, or mix the sources there."
        )
    is_stream = isinstance(train_dataset, IterableDataset) and hasattr(train_dataset, "sources")
    if not isinstance(train_dataset, MixtureDataset) and not is_stream:
        raise ArgumentError(
            f"{field} has shares of {', '.join(map(repr, shares))}, but train_dataset is a "
            f"{type(train_dataset).__name__}. Pass a dict of datasets with these names: "
            f"train_dataset={{'code': a, ...}}."
        )
    names = train_dataset.names
    for name in shares:
        if name not in names:
            said = did_you_mean(name, names)
            raise ArgumentError(f"{field} names {name!r}, but train_dataset has {', '.join(map(repr, names))}.{said}")
        source = train_dataset.sources[name]
        values = [one[name] for _, one in schedule or [(0, shares)]]
        if has_length(source) and len(source) == 0 and any(parse_share(value)[0] for value in values):
            raise ArgumentError(f"{field} gives a share to {name!r}, which has no samples. Set it to 0, or remove it.")
    if missing := [name for name in names if name not in shares]:
        raise ArgumentError(f"{field} has no share for {missing[0]!r} of train_dataset; 0 excludes it from training.")


def describe_sources(args: Any, loader: Any, plan: StepPlan, *, dispatches: bool) -> list[str]:
    """Returns a line about each source.

    It warns about sources that are repeated often, or not seen entirely.

    Raises ArgumentError if an override has replaced the order of the mixture.
    """
    data = find_data(loader)
    order: Any = getattr(getattr(loader, "batch_sampler", None), "order", None)  # Any: a dataloader of the user's
    order = getattr(order, "mixture", order)
    asked = [name for name in ("mixture", "mixture_schedule") if get_value(args, name) is not None]
    if asked and not (dispatches or isinstance(data, IterableDataset) or hasattr(order, "uses")):
        raise ArgumentError(
            f"{asked[0]} has no effect: _get_train_sampler or get_train_dataloader is overridden, so the samples come "
            f"in the order of a {type(getattr(order, 'sampler', order)).__name__}. Remove the override or {asked[0]}."
        )
    if isinstance(data, MixtureDataset) and data.curriculum is not None:
        return []
    source = order if hasattr(order, "uses") else data
    if not hasattr(source, "uses") or plan.has_open_end:
        return []
    lines = []
    for one in source.uses(plan.max_steps / plan.steps_per_epoch):
        share = f"{one.share:.1%}" + (f" to {one.last_share:.1%}" if one.share != one.last_share else "")
        lines.append(
            f"source    {one.name}: {one.rows} rows, {share} of the samples, {one.visits:.3g} visits of each row"
        )
        if args.should_log and asked and one.visits > MANY_VISITS:
            logger.warning("%s: each row of %r is seen %.3g times.", asked[0], one.name, one.visits)
        elif args.should_log and asked and 0 < one.visits < 1:
            logger.warning("%s: %.0f %% of the rows of %r are seen.", asked[0], 100 * one.visits, one.name)
    return lines
