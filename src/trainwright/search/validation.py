"""Validation of a search's settings before the first trial, split into ours and the backend's."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from trainwright._types import JSONObject
from trainwright.config import overrides
from trainwright.config.protocol import Arguments
from trainwright.errors import DataError, MissingModelError, SearchSpaceError, did_you_mean
from trainwright.search.base import Objective, Params, SearchPlan, SearchSettings

logger = logging.getLogger(__name__)

DIRECTIONS = ("minimize", "maximize")
CHOICES = {"failed_trials": ("continue", "stop"), "pruned_checkpoints": ("keep", "save", "delete")}


def make_plan(
    *, space: Any, num_trials: object, direction: Any, compute_objective: object, options: Params
) -> SearchPlan:
    """Makes the plan of a search from the arguments of `hyperparameter_search`; `options` are ours and others.

    Raises:
        SearchSpaceError: a value is not allowed; names the allowed ones.
    """
    names = [field.name for field in dataclasses.fields(SearchSettings)]
    own = {name: value for name, value in options.items() if name in names}
    for name, allowed in CHOICES.items():
        if own.get(name, allowed[0]) not in allowed:
            raise SearchSpaceError(f"{name}={own[name]!r} is not allowed. Allowed: {', '.join(map(repr, allowed))}.")
    if isinstance(num_trials, bool) or not isinstance(num_trials, int) or num_trials < 1:
        raise SearchSpaceError(f"n_trials={num_trials!r} is no number of trials; it must be a whole one, at least 1.")
    for name, thing in (("hp_space", space), ("compute_objective", compute_objective)):
        if thing is not None and not callable(thing):
            raise SearchSpaceError(f"{name}={thing!r} cannot be called; pass a function.")
    directions = tuple(direction) if isinstance(direction, (list, tuple)) else (direction,)
    for one in directions or ("",):
        if one not in DIRECTIONS:
            raise SearchSpaceError(f"direction={direction!r}: use 'minimize' or 'maximize', or a list of these.")
    if len(directions) > 1 and compute_objective is None:
        raise SearchSpaceError(
            f"direction has {len(directions)} entries, and the default objective is one number. Pass "
            "compute_objective=a function that returns a list of as many."
        )
    rest = {name: value for name, value in options.items() if name not in names}
    return SearchPlan(num_trials=num_trials, directions=directions, space=space,
                settings=SearchSettings(**own), options=rest)  # fmt: skip


def check_trainer_objects(*, model_init: object, train_dataset: object, eval_dataset: object) -> None:
    """Raises MissingModelError without `model_init` (all trials would train one model), DataError without data."""
    if model_init is None:
        raise MissingModelError(
            "hyperparameter_search needs a new model for each trial, and this trainer was given a model. Pass "
            "model_init=a function that makes one."
        )
    if train_dataset is None:
        raise DataError("hyperparameter_search trains, and there is no train_dataset. Pass one.")
    if eval_dataset is None:
        raise DataError("hyperparameter_search judges trials by an evaluation, and there is no eval_dataset. Pass one.")


def check_names(args: Arguments, params: object) -> None:
    """Refuses names that are no arguments; warns once of those that trials cannot differ in."""
    if not isinstance(params, Mapping):
        raise SearchSpaceError(
            f"hp_space returned {type(params).__name__}; it must return a dict from names of arguments to values."
        )
    _refuse(problem for name in params if (problem := overrides.problem_of_name(args, name)))
    if settled := tuple(name for name in params if overrides.is_settled(name)):
        _warn_of_settled(settled)


@cache
def _warn_of_settled(names: tuple[str, ...]) -> None:
    logger.warning(
        "%s cannot differ between trials and has no effect in hp_space: it is settled when the trainer is made. Set "
        "it in the arguments.", ", ".join(names),
    )  # fmt: skip


def check_values(args: Arguments, values: Iterable[tuple[str, object]]) -> None:
    """Raises SearchSpaceError that names the values which their fields cannot hold."""
    varied = [(name, value) for name, value in values if not overrides.is_settled(name)]
    _refuse(problem for name, value in varied if (problem := overrides.problem_of_value(args, name, value)))


def check_options(given: Params, known: Iterable[str], *, backend: str) -> None:
    """Refuses other keywords of the call that the backend does not take, with the nearest that it takes."""
    ours = [field.name for field in dataclasses.fields(SearchSettings)]
    names = [*known, *ours]
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names)
            raise SearchSpaceError(
                f"hyperparameter_search got {name}=..., which backend={backend!r} does not know.{hint} It takes "
                f"{', '.join(sorted(names))}."
            )


def checked_objective(compute: Callable[..., Objective], metrics: JSONObject, plan: SearchPlan) -> Objective:
    """Computes the objective of an evaluation: a float, or a list where there are several directions.

    Raises:
        SearchSpaceError: the number of values is not that of the directions.
    """
    objective = compute(metrics)
    values = list(objective) if isinstance(objective, (list, tuple)) else [objective]
    if len(values) != len(plan.directions):
        raise SearchSpaceError(
            f"compute_objective returned {objective!r}, and direction asks for {len(plan.directions)} "
            f"number{'s' if len(plan.directions) > 1 else ''} ({', '.join(plan.directions)})."
        )
    for value in values:
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise SearchSpaceError(f"compute_objective returned {objective!r}; an objective is a number.")
    numbers = [float(value) for value in values]
    return numbers if plan.is_multi else numbers[0]


def _refuse(problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        raise SearchSpaceError("The search's space cannot be used: " + " ".join(found))
