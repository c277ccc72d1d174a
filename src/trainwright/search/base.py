"""Shared types of a search: the protocol of a backend, the trainer's functions that it calls, the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from trainwright._types import JSONObject, json_value
from trainwright.config.protocol import Arguments

SPEEDS = ("_runtime", "_per_second")
# Measured or counted beside the metrics; a sum of metrics must not have them in it.
NO_METRICS = ("epoch", "num_input_tokens_seen")

Trial: TypeAlias = Any  # the backend's own object: Optuna's trial, a dict of Ray or W&B
Params: TypeAlias = Mapping[str, Any]  # values that a backend draws are of all types
Objective: TypeAlias = Any  # a number, or a list of numbers; None before the first evaluation


class BestRun(NamedTuple):
    """The best trial of a search.

    Attributes:
        run_id: its id; its directory is `run-<id>`, unless `hp_name` named it.
        objective: value of `compute_objective`, a list where there are several.
        hyperparameters: arguments of the trial.
        run_summary: summary of the backend: Ray's analysis, the id of a W&B sweep.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: JSONObject
    run_summary: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Settings that transformers' search lacks; passed as keywords.

    Attributes:
        failed_trials: "continue" records a failed trial and starts the next one; "stop" raises its error.
        pruned_checkpoints: of a trial that is ended early: "keep" what it had saved, "save" its last step too, or
            "delete" them.
        load_best_trial: load the model of the best trial at the end.
        resume_search: continue a study in `storage`: its trials count, and an interrupted one is resumed.
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
    # maps a trial (None for backends that draw themselves) to parameters, or to domains
    space: Callable[[Trial], Params]
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
    name: str | None = None  # name of the run, where the backend gives it one


@dataclass(slots=True, kw_only=True)
class TrialResult:
    """Result of a trial."""

    objective: Objective = None  # of the last evaluation
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
    check: Callable[[Params], None]  # raises if a trial cannot be trained with these parameters
    folder_of: Callable[[TrialSpec, Trial], str]  # returns the directory of a trial
    find_checkpoint: Callable[[str], str | None]  # returns the newest complete checkpoint in a directory of a trial
    # calls a function on the main process and returns its result on all
    agree: Callable[[Callable[[], Any]], Any]  # of the type that the function returns
    # returns a function that makes the trainer again in another process, and returns its handle
    pack: Callable[[], Callable[[], TrainerHandle]]


@dataclass(slots=True, kw_only=True)
class SearchState:
    """State of a running search in the trainer; functions are those given to `hyperparameter_search`, or defaults."""

    backend: SearchBackend
    plan: SearchPlan
    args: Arguments  # the trainer's arguments from before the search
    callback_states: JSONObject  # states of the callbacks from before the first trial
    name: object = None  # the backend's
    space: Callable[[Trial], Params] | None = None
    hp_name: Callable[[Trial], str] | None = None
    compute_objective: Callable[[dict[str, float]], Objective]
    objective: Objective = None  # of the last evaluation of the running trial
    is_under_way: ClassVar[bool] = True
    offer: TrialSpec = field(default_factory=lambda: TrialSpec(id="", params={}))
    outcome: TrialResult = field(default_factory=TrialResult)


class SearchBackend(Protocol):
    """Library that decides which trials there are."""

    name: str  # value of `backend`
    tracker: str | None  # tracker by which it gets evaluations; None if it gets them by `report`

    def default_space(self, trial: Trial) -> Params:
        """Returns the parameters (or domains) of transformers' default space."""
        ...

    def check(self, host: TrainerHandle, plan: SearchPlan) -> None:
        """Checks space and options before the first trial; SearchSpaceError: one of them cannot work."""
        ...

    def report(self, trial: Trial, outcome: TrialResult, save: Callable[[str], None] | None) -> bool:
        """Reports an evaluation, the last entry of `outcome.curve`; returns whether the trial should end here.

        `save` writes a checkpoint into a directory; None where none is due.
        """
        ...

    def frozen(self, offer: TrialSpec) -> Trial:
        """Returns a trial that has these parameters and draws none."""
        ...

    def run(self, host: TrainerHandle, plan: SearchPlan) -> BestRun | list[BestRun]:
        """Runs all trials; returns the best, of several objectives the undominated ones. SearchError: none ended."""
        ...


def default_compute_objective(metrics: dict[str, float]) -> float:
    """Returns the default objective of a search.

    Args:
        metrics: of an evaluation, by name.

    Returns:
        The sum of the metrics without loss, times and memory; `eval_loss` where there are no others.
    """
    scores = {
        name: value
        for name, value in metrics.items()
        if name not in NO_METRICS and name != "eval_loss" and not name.endswith(SPEEDS) and "_mem_" not in name
    }
    return sum(scores.values()) if scores else metrics["eval_loss"]


def values_of(objective: Objective) -> list[float]:
    """Returns one objective or several as a list."""
    return [float(value) for value in (objective if isinstance(objective, (list, tuple)) else (objective,))]


def is_better(one: Objective, other: Objective, directions: Sequence[str]) -> bool:
    """Returns True if one objective is better than another; of several, all at least as good and one better."""
    signs = [1 if direction == "minimize" else -1 for direction in directions]
    gains = [sign * (theirs - mine) for sign, mine, theirs in zip(signs, values_of(one), values_of(other), strict=True)]
    return all(gain >= 0 for gain in gains) and any(gain > 0 for gain in gains)


def drawn(trial: Trial) -> JSONObject:
    """Returns the parameters of a trial of any backend as JSON: trials are dicts, or have them as `params`."""
    params = trial if isinstance(trial, Mapping) else getattr(trial, "params", {})
    return {str(name): json_value(value) for name, value in params.items()}
