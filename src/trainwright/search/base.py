"""Shared parts of a search: the protocol of a backend, the trainer's functions that it calls, the results.

Also the checks before the first trial, by us and by the backends, and the table of backends.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from trainwright._types import JSONObject, json_value
from trainwright.config import overrides
from trainwright.config.enums import HPSearchBackend
from trainwright.config.protocol import Arguments
from trainwright.errors import (
    ArgumentError,
    DataError,
    MissingModelError,
    MissingPackageError,
    SearchSpaceError,
    did_you_mean,
)
from trainwright.support.counterparts import Counterpart
from trainwright.support.html_table import html_pairs, html_section

logger = logging.getLogger(__name__)

SPEEDS = ("_runtime", "_per_second")
# Not metrics, though logged with them; the sum of the metrics must not include them.
NO_METRICS = ("epoch", "num_input_tokens_seen")

Trial: TypeAlias = Any  # the backend's own object: Optuna's trial, a dict of Ray or W&B
Params: TypeAlias = Mapping[str, Any]  # values that a backend draws are of all types
Objective: TypeAlias = Any  # a number, or a list of numbers; None before the first evaluation


class BestRunFields(NamedTuple):
    """Fields of a BestRun."""

    run_id: str
    objective: float | list[float]
    hyperparameters: JSONObject
    run_summary: object = None


class BestRun(BestRunFields, Counterpart, original="transformers.trainer_utils"):
    """The best trial of a search.

    Attributes:
        run_id: its id; its directory is `run-<id>`, unless `hp_name` named it.
        objective: value of `compute_objective`, a list for several directions.
        hyperparameters: arguments of the trial.
        run_summary: summary of the backend: Ray's analysis, the id of a W&B sweep.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        return html_section(
            f"best trial: {self.run_id}",
            html_pairs({"objective": self.objective}),
            html_section("hyperparameters", html_pairs(self.hyperparameters)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Settings that transformers' search lacks; passed as keywords.

    Attributes:
        failed_trials: "continue" records a failed trial and starts the next one; "stop" raises its error.
        pruned_checkpoints: of a trial that is ended early: "keep" its checkpoints, "save" its last step too, or
            "delete" them.
        load_best_trial: load the model of the best trial at the end.
        resume_search: continue a study in `storage`: its trials count, and an interrupted trial is resumed.
    """

    failed_trials: str = "continue"
    pruned_checkpoints: str = "keep"
    load_best_trial: bool = False
    resume_search: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """Settings of a search."""

    num_trials: int
    directions: tuple[str, ...]  # "minimize" or "maximize" for each objective
    space: Callable[[Trial], Params]  # from a trial (None: the backend draws itself) to parameters, or domains
    settings: SearchSettings
    options: Params  # keywords for the backend's library

    @property
    def is_multi(self) -> bool:
        return len(self.directions) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """Trial that is about to run, as all its processes know it."""

    id: str
    params: Params  # its values of arguments
    checkpoint: str | None = None  # checkpoint of an earlier attempt; None to start from the beginning
    name: str | None = None  # name of the run, if the backend gives it one


@dataclass(slots=True, kw_only=True)
class TrialResult:
    """Result of a trial."""

    objective: Objective = None  # result of the last evaluation
    curve: list[tuple[int, Objective]] = field(default_factory=list)  # (step, objective) of every evaluation
    was_pruned: bool = False  # whether it was ended early, because it was worse than others
    was_heard: bool = False  # whether an evaluation during training was reported to the backend
    metrics: JSONObject = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHandle:
    """Functions of the trainer for a backend."""

    args: Arguments  # the trainer's arguments; no trial changes them
    is_main: bool
    num_processes: int
    run: Callable[[TrialSpec, Trial], TrialResult]  # trains a trial and returns its result; raises if it fails
    check: Callable[[Params], object]  # raises if a trial cannot be trained with these parameters
    folder_of: Callable[[TrialSpec, Trial], str]  # returns the directory of a trial
    find_checkpoint: Callable[[str], str | None]  # returns the newest complete checkpoint in a directory of a trial
    agree: Callable[[Callable[[], Any]], Any]  # calls a function on the main process, returns its result on all
    pack: Callable[[], Callable[[], TrainerHandle]]  # for another process: makes the trainer again, and its handle


@dataclass(slots=True, kw_only=True)
class SearchState:
    """State of a running search in the trainer; functions come from `hyperparameter_search`, or are defaults."""

    backend: SearchBackend
    plan: SearchPlan
    args: Arguments  # the trainer's arguments from before the search
    callback_states: JSONObject  # states of the callbacks from before the first trial
    name: object = None  # the backend's
    space: Callable[[Trial], Params] | None = None
    hp_name: Callable[[Trial], str] | None = None
    compute_objective: Callable[[dict[str, float]], Objective]
    objective: Objective = None  # result of the last evaluation of the running trial
    is_under_way: ClassVar[bool] = True
    said: set[str] = field(default_factory=set)  # checks whose findings in the data were said in an earlier trial
    offer: TrialSpec = field(default_factory=lambda: TrialSpec(id="", params={}))
    outcome: TrialResult = field(default_factory=TrialResult)


class SearchBackend(Protocol):
    """Library that decides which trials there are."""

    name: str  # value of `backend`
    tracker: str | None  # tracker by which it gets evaluations; None if it gets them by `report`

    def check(self, host: TrainerHandle, plan: SearchPlan) -> None:
        """Checks space and options before the first trial; SearchSpaceError if they cannot work."""

    def report(self, trial: Trial, outcome: TrialResult, save: Callable[[str], None] | None) -> bool:
        """Reports the last entry of `outcome.curve`; True ends the trial. `save` writes a checkpoint if one is due."""

    def frozen(self, offer: TrialSpec) -> Trial:
        """Returns a trial that has these parameters and draws none."""

    def run(self, host: TrainerHandle, plan: SearchPlan) -> BestRun | list[BestRun]:
        """Runs all trials; returns the best, of several objectives the undominated ones. SearchError: none ended."""


def default_compute_objective(metrics: dict[str, float]) -> float:
    """Returns the default objective of a search.

    Args:
        metrics: of an evaluation, by name.

    Returns:
        The sum of the metrics without loss, times and memory; `eval_loss` if there are no others.
    """
    scores = {
        name: value
        for name, value in metrics.items()
        if name not in NO_METRICS and name != "eval_loss" and not name.endswith(SPEEDS) and "_mem_" not in name
    }
    return sum(scores.values()) if scores else metrics["eval_loss"]


def to_list(objective: Objective) -> list[float]:
    """Returns one objective or several as a list."""
    return [float(value) for value in (objective if isinstance(objective, (list, tuple)) else (objective,))]


def is_better(one: Objective, other: Objective, directions: Sequence[str]) -> bool:
    """Returns True if one objective is better than another; of several, all at least as good and one better."""
    signs = [1 if direction == "minimize" else -1 for direction in directions]
    gains = [sign * (theirs - mine) for sign, mine, theirs in zip(signs, to_list(one), to_list(other), strict=True)]
    return all(gain >= 0 for gain in gains) and any(gain > 0 for gain in gains)


def drawn(trial: Trial) -> JSONObject:
    """Returns the parameters of a trial of any backend as JSON: trials are dicts, or have them as `params`."""
    params = trial if isinstance(trial, Mapping) else getattr(trial, "params", {})
    return {str(name): json_value(value) for name, value in params.items()}


# -- checks before the first trial ------------------------------------------------------------------------------------

DIRECTIONS = ("minimize", "maximize")
CHOICES = {"failed_trials": ("continue", "stop"), "pruned_checkpoints": ("keep", "save", "delete")}


def make_plan(
    *, space: Any, num_trials: object, direction: Any, compute_objective: object, options: Params
) -> SearchPlan:
    """Makes the plan of a search from the arguments of the call; SearchSpaceError for a value that is not allowed."""
    names = [field.name for field in dataclasses.fields(SearchSettings)]
    own = {name: value for name, value in options.items() if name in names}
    for name, allowed in CHOICES.items():
        if own.get(name, allowed[0]) not in allowed:
            raise SearchSpaceError(f"{name}={own[name]!r} is not allowed. Allowed: {', '.join(map(repr, allowed))}.")
    if isinstance(num_trials, bool) or not isinstance(num_trials, int) or num_trials < 1:
        raise SearchSpaceError(f"n_trials={num_trials!r} is not a number of trials: a whole one, at least 1.")
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
            "compute_objective=a function that returns a list of the same length."
        )
    rest = {name: value for name, value in options.items() if name not in names}
    return SearchPlan(
        num_trials=num_trials, directions=directions, space=space, settings=SearchSettings(**own), options=rest
    )


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
    """Refuses names that are not arguments; warns once of arguments that must be equal in all trials."""
    if not isinstance(params, Mapping):
        raise SearchSpaceError(
            f"hp_space returned {type(params).__name__}; it must return a dict from names of arguments to values."
        )
    _refuse(problem for name in params if (problem := overrides.find_name_problem(args, name)))
    if settled := tuple(name for name in params if overrides.is_settled(name)):
        _warn_settled(settled)


@cache
def _warn_settled(names: tuple[str, ...]) -> None:
    logger.warning(
        "%s cannot differ between trials and has no effect in hp_space: it is read once, when the Trainer is "
        "constructed. Set it in the arguments.",
        ", ".join(names),
    )


def check_values(args: Arguments, values: Iterable[tuple[str, object]]) -> None:
    """Raises SearchSpaceError that names the values which their fields cannot hold."""
    varied = [(name, value) for name, value in values if not overrides.is_settled(name)]
    _refuse(problem for name, value in varied if (problem := overrides.find_value_problem(args, name, value)))


def check_options(given: Params, known: Iterable[str], *, backend: str) -> None:
    """Refuses other keywords of the call that the backend does not take, with the nearest that it takes."""
    names = [*known, *(field.name for field in dataclasses.fields(SearchSettings))]
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names)
            raise SearchSpaceError(
                f"hyperparameter_search got {name}=..., which backend={backend!r} does not know.{hint} It takes "
                f"{', '.join(sorted(names))}."
            )


def checked_objective(compute: Callable[..., Objective], metrics: JSONObject, plan: SearchPlan) -> Objective:
    """Computes the objective of an evaluation: a float, or a list with an entry for each direction."""
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


# -- the libraries ----------------------------------------------------------------------------------------------------

# Name -> package that is looked for, module and class of the backend, and its package for pip.
BACKENDS = {
    "optuna": ("optuna", "optuna", "OptunaBackend", "optuna"),
    "ray": ("ray", "ray", "RayBackend", "'ray[tune]'"),
    "wandb": ("wandb", "wandb_sweep", "WandbBackend", "wandb"),
}
GONE = {"sigopt": "SigOpt's service was shut down in 2024 and transformers took it out"}


def select_backend(name: object) -> tuple[HPSearchBackend, SearchBackend]:
    """Returns the named backend, or for None the first installed; an unknown or missing backend is an error."""
    chosen = _installed() if name is None else str(getattr(name, "value", name))
    if chosen not in BACKENDS:
        reason = f": {GONE[chosen]}" if chosen in GONE else " is not a backend of a search"
        raise ArgumentError(f"backend={chosen!r}{reason}. Use {', '.join(map(repr, BACKENDS))}.")
    needed, module, kind, package = BACKENDS[chosen]
    if find_spec(needed) is None:
        raise MissingPackageError(f"backend={chosen!r} needs a package that is not there: pip install {package}")
    return HPSearchBackend(chosen), getattr(importlib.import_module(f"trainwright.search.{module}"), kind)()


def _installed() -> str:
    found = [name for name, (needed, *_) in BACKENDS.items() if find_spec(needed) is not None]
    if not found:
        ways = ", ".join(f"pip install {package}" for *_, package in BACKENDS.values())
        raise MissingPackageError(f"A hyperparameter search needs one of these packages; none is installed: {ways}.")
    if len(found) > 1:
        logger.info("Using backend=%r (installed: %s).", found[0], ", ".join(found))
    return found[0]
