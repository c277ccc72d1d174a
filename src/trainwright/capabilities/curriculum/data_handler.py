"""What a curriculum does with training data: its dataset is read as a mixture, in the order that its weights set."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Sampler

from trainwright._types import DatasetLike, is_instance_of
from trainwright.config.enums import word
from trainwright.config.fields import batching_fields, value_if_known
from trainwright.config.plans import SamplingPlan, StepPlan
from trainwright.data.row_names import ONE_SOURCE
from trainwright.data.sources import DataHandler, find_data
from trainwright.errors import ArgumentError


class CurriculumHandler(DataHandler):
    """Reads the dataset of a `Curriculum`."""

    def adapt(self, dataset: DatasetLike) -> DatasetLike:
        if not is_curriculum(dataset):
            return dataset
        from trainwright.capabilities.mixture.dataset import MixtureDataset, as_mixture

        inner = as_mixture(dataset.dataset)
        return MixtureDataset(inner.sources if isinstance(inner, MixtureDataset) else {ONE_SOURCE: inner}, dataset)

    def check(self, args: Any, dataset: DatasetLike) -> None:
        check_curriculum(args, dataset)

    def make_order(self, dataset: DatasetLike, plan: SamplingPlan) -> Sampler[Any] | None:
        curriculum = find_curriculum(dataset)
        if curriculum is None:
            return None
        order: Sampler[Any] = curriculum.make_order(dataset, seed=plan.seed, shuffles=plan.strategy != "sequential")
        return order

    def describe(self, args: Any, loader: Any, plan: StepPlan, *, dispatches: bool) -> list[str]:
        curriculum = find_curriculum(find_data(loader))
        return [] if curriculum is None else [f"weights   {curriculum}"]


HANDLER = CurriculumHandler()


def is_curriculum(dataset: object) -> bool:
    """Returns True if a dataset is a `Curriculum`."""
    return is_instance_of(dataset, "trainwright.capabilities.curriculum.curriculum", "Curriculum")


def find_curriculum(dataset: Any) -> Any:  # a Curriculum, of a module that is not loaded without one
    """Returns the curriculum that sets the order of a mixture; None if it has none."""
    is_mixture = is_instance_of(dataset, "trainwright.capabilities.mixture.dataset", "MixtureDataset")
    return dataset.curriculum if is_mixture else None


def check_curriculum(args: Any, train_dataset: DatasetLike) -> None:
    """Raises ArgumentError for settings that conflict with a curriculum about the order of samples."""
    if is_curriculum(train_dataset):
        raise ArgumentError(
            "The Curriculum has no effect: get_train_dataloader is overridden and decides the order of samples. Pass "
            "the dataset itself, or remove the override."
        )
    if find_curriculum(train_dataset) is None:
        return
    others = [name for name in ("mixture", "mixture_schedule") if value_if_known(args, name) is not None]
    others += batching_fields(args)
    if word(args.train_sampling_strategy) not in ("random", "sequential"):
        others.append(f"train_sampling_strategy={word(args.train_sampling_strategy)!r}")
    if not args.dataloader_in_order:
        others.append("dataloader_in_order=False")
    if others:
        raise ArgumentError(
            f"A Curriculum decides the order of samples, and {others[0]} does too. Remove one of them; a function "
            "that returns a dict of weights replaces mixture."
        )
