"""The vocabulary of a search: what a backend is, what it may ask of the trainer, and what comes out.

A backend decides which trials there are. What a trial is (train, evaluate, an objective) is the trainer's, which hands
itself over as a few functions in a `Host`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from trainwright.config.protocol import Arguments

SPEEDS = ("_runtime", "_per_second")
# Measured or counted beside the metrics; a sum of metrics must not have them in it.
NO_METRICS = ("epoch", "num_input_tokens_seen")

# Any, throughout: a trial is the backend's own object, and the values it draws are of all types.


class BestRun(NamedTuple):
    """The best trial of a search.

    Attributes:
        run_id: its id; its directory is `run-<id>`, unless `hp_name` named it.
        objective: what `compute_objective` gave for it, a list where there are several.
        hyperparameters: what it was trained with.
        run_summary: what else the backend knows: Ray's analysis, the id of a W&B sweep.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Ours, beside what transformers' search takes; given as keywords too.

    Attributes:
        failed_trials: "continue" records a trial that fails and goes on to the next; "stop" raises its error.
        pruned_checkpoints: of a trial that is ended early: "keep" what it had saved, "save" its last step too, or
            "delete" them.
        load_best_trial: in the end the trainer has the model of the best trial.
        resume_search: a study in `storage` goes on: its trials count, and one that was cut off is taken up again.
    """

    failed_trials: str = "continue"
    pruned_checkpoints: str = "keep"
    load_best_trial: bool = False
    resume_search: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """What was asked of a search.

    Attributes:
        directions: "minimize" or "maximize" for each objective.
        space: from a trial (None for backends that draw themselves) to parameters, or to domains.
        options: keywords for the backend's own library.
    """

    num_trials: int
    directions: tuple[str, ...]
    space: Callable[[Any], Mapping[str, object]]
    settings: SearchSettings
    options: Mapping[str, object]

    @property
    def is_multi(self) -> bool:
        return len(self.directions) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """A trial that is about to run, as all processes of it must know it.

    Attributes:
        params: the arguments that it differs in.
        checkpoint: where an earlier attempt at it stands; None: from the beginning.
        name: of the run, where the backend gives it one.
    """

    id: str
    params: Mapping[str, object]
    checkpoint: str | None = None
    name: str | None = None


@dataclass(slots=True, kw_only=True)
class TrialResult:
    """What came of a trial.

    Attributes:
        objective: of the last evaluation.
        curve: (step, objective) of every evaluation.
        was_pruned: it was ended early, because it did worse than others.
        was_heard: the backend was told of an evaluation in training.
    """

    objective: Any = None
    curve: list[tuple[int, Any]] = field(default_factory=list)
    was_pruned: bool = False
    was_heard: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerHandle:
    """What a backend may ask of the trainer.

    Attributes:
        args: as given; no trial changes them.
        run: trains a trial and says what came of it; an exception means that it failed.
        check: raises if a trial cannot be trained with these parameters.
        folder_of: where a trial writes.
        find_checkpoint: the newest complete checkpoint in a directory of a trial.
        agree: what the main process decides, in all of them.
        pack: the trainer for another process: a function that makes it anew there, and gives its own `Host`.
    """

    args: Arguments
    is_main: bool
    num_processes: int
    run: Callable[[TrialSpec, Any], TrialResult]
    check: Callable[[Mapping[str, object]], None]
    folder_of: Callable[[TrialSpec, Any], str]
    find_checkpoint: Callable[[str], str | None]
    agree: Callable[[Callable[[], Any]], Any]
    pack: Callable[[], Callable[[], TrainerHandle]]


@dataclass(slots=True, kw_only=True)
class SearchState:
    """A search under way, as the trainer knows it.

    Attributes:
        args: the trainer's, as given.
        callback_states: of the callbacks, as they were before the first trial.
        offer, outcome: of the trial that runs now.
    """

    backend: SearchBackend
    plan: SearchPlan
    args: Arguments
    callback_states: dict[str, Any]
    offer: TrialSpec = field(default_factory=lambda: TrialSpec(id="", params={}))
    outcome: TrialResult = field(default_factory=TrialResult)


class SearchBackend(Protocol):
    """A library that decides which trials there are.

    Attributes:
        tracker: a tracker that it needs to hear of evaluations by; None: it is told by `report`.
    """

    name: str
    tracker: str | None

    def default_space(self, trial: Any) -> Mapping[str, object]:
        """The space where none was given."""
        ...

    def check(self, host: TrainerHandle, plan: SearchPlan) -> None:
        """Raises if the space or the options cannot work, before the first trial."""
        ...

    def report(self, trial: Any, outcome: TrialResult, save: Callable[[str], None] | None) -> bool:
        """Hears of an evaluation; True if the trial should end here.

        `save` writes a checkpoint into a directory; None where none is due.
        """
        ...

    def frozen(self, offer: TrialSpec) -> Any:
        """A trial that has these parameters and draws none."""
        ...

    def run(self, host: TrainerHandle, plan: SearchPlan) -> BestRun | list[BestRun]:
        """All trials; the best of them, or where there are several objectives those that none is better than."""
        ...


def default_compute_objective(metrics: dict[str, float]) -> float:
    """The loss of an evaluation where it gave nothing else, otherwise the sum of its metrics."""
    scores = {
        name: value
        for name, value in metrics.items()
        if name not in NO_METRICS and name != "eval_loss" and not name.endswith(SPEEDS) and "_mem_" not in name
    }
    return sum(scores.values()) if scores else metrics["eval_loss"]


def values_of(objective: Any) -> list[float]:
    """One objective or several, as a list."""
    return [float(value) for value in (objective if isinstance(objective, (list, tuple)) else (objective,))]


def is_better(one: Any, other: Any, directions: Sequence[str]) -> bool:
    """Whether one objective is better than another; with several, where all are at least as good and one is better."""
    signs = [1 if direction == "minimize" else -1 for direction in directions]
    gains = [sign * (theirs - mine) for sign, mine, theirs in zip(signs, values_of(one), values_of(other), strict=True)]
    return all(gain >= 0 for gain in gains) and any(gain > 0 for gain in gains)
