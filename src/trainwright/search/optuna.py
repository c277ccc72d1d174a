"""Optuna: studies with its samplers, pruners and storages, kept by one process; the others of a trial follow."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Iterator

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import FixedTrial, TrialState, create_trial

from trainwright.errors import SearchError, SearchSpaceError
from trainwright.search import base
from trainwright.search.base import BestRun, Objective, Params, SearchPlan, TrainerHandle, Trial, TrialResult, TrialSpec
from trainwright.search.search_record import TrialRunner, follow
from trainwright.support.host import is_process_alive

OF_OPTIMIZE = ("timeout", "n_jobs", "gc_after_trial", "catch")
OF_THE_STUDY = tuple(name for name in inspect.signature(optuna.create_study).parameters if "direction" not in name)

# Attributes of a trial, for dashboards and for a search that is resumed.
FOLDER = "folder"
OWNER = "owner"
INTERRUPTED = "interrupted"
GOES_ON = "goes_on_from"
METRICS = "metrics"


class OptunaBackend:
    """Runs trials one after the other, each drawn by the study's sampler."""

    name = "optuna"
    tracker = None

    def check(self, host: TrainerHandle, plan: SearchPlan) -> None:
        base.check_options(plan.options, (*OF_THE_STUDY, *OF_OPTIMIZE), backend=self.name)
        if plan.options.get("n_jobs", 1) != 1:
            raise SearchSpaceError(
                f"n_jobs={plan.options['n_jobs']}: trials in threads would share one trainer. Run the script several "
                "times with one storage and study_name, load_if_exists=True, and an output_dir for each."
            )
        if plan.settings.resume_search and plan.options.get("storage") is None:
            raise SearchSpaceError("resume_search=True needs a storage, for example storage='sqlite:///search.db'.")
        sampler = optuna.samplers.RandomSampler(seed=0)
        optuna_is_loud = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            probe = optuna.create_study(sampler=sampler, directions=_directions(plan)).ask()
        finally:
            optuna.logging.set_verbosity(optuna_is_loud)
        params = plan.space(probe)
        base.check_names(host.args, params)
        base.check_values(host.args, [*params.items(), *_ends(probe, params)])

    def report(self, trial: Trial, outcome: TrialResult, save: Callable[[str], None] | None) -> bool:
        study = getattr(trial, "study", None)
        if study is None or len(study.directions) > 1:  # a trial made by a library, or a study without pruning
            return False
        step, objective = outcome.curve[-1]
        trial.report(objective, step)
        return bool(trial.should_prune())

    def frozen(self, offer: TrialSpec) -> Trial:
        return FixedTrial(dict(offer.params), int(offer.id))

    def run(self, host: TrainerHandle, plan: SearchPlan) -> BestRun | list[BestRun]:
        if not host.is_main:
            follow(host, self.frozen)
            return _same(host, list)
        attempts = TrialRunner(host, plan, backend=self.name)
        options = dict(plan.options)
        how = {name: options.pop(name) for name in OF_OPTIMIZE if name in options}
        goes_on = plan.settings.failed_trials == "continue" and host.num_processes == 1
        how["catch"] = how.get("catch", (Exception,)) if goes_on else ()
        num_trials = plan.num_trials
        resumes = plan.settings.resume_search
        if resumes:
            options = {"study_name": "search", **options, "load_if_exists": True}
        study = optuna.create_study(directions=_directions(plan), **options)
        if resumes:
            num_trials -= take_up(study)
        one = _Objective(host, plan, attempts)
        with attempts.ending_together():
            if num_trials > 0:
                study.optimize(one, n_trials=num_trials, **how)
            if one.mistake is not None:
                raise one.mistake
        return _same(host, lambda: find_best(study, attempts))


def _same(host: TrainerHandle, decide: Callable[[], BestRun | list[BestRun]]) -> BestRun | list[BestRun]:
    best: BestRun | list[BestRun] = host.agree(decide)
    return best


class _Objective:
    def __init__(self, host: TrainerHandle, plan: SearchPlan, attempts: TrialRunner) -> None:
        self._host = host
        self._plan = plan
        self._attempts = attempts
        self.mistake: SearchSpaceError | None = None

    def __call__(self, trial: optuna.Trial) -> Objective:
        trial.set_user_attr(OWNER, [socket.gethostname(), os.getpid()])
        try:
            return self._attempt(trial)
        except SearchSpaceError as error:  # the user's mistake: `catch` must not repeat it in each trial
            self.mistake = error
            trial.study.stop()
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            trial.set_user_attr(INTERRUPTED, True)
            if isinstance(error, SystemExit):  # Optuna would leave it running
                trial.study.tell(trial, state=TrialState.FAIL)
            raise

    def _attempt(self, trial: optuna.Trial) -> Objective:
        params = self._plan.space(trial)
        base.check_names(self._host.args, params)
        base.check_values(self._host.args, params.items())
        folders = trial.user_attrs.get(GOES_ON, {}).get("folders", [])
        checkpoint = next((found for folder in folders if (found := self._host.find_checkpoint(folder))), None)
        offer = TrialSpec(id=str(trial.number), params=dict(params), checkpoint=checkpoint)
        trial.set_user_attr(FOLDER, self._host.folder_of(offer, trial))
        outcome = self._attempts.run(offer, trial)
        metrics = outcome.metrics.items()
        numbers = {n: v for n, v in metrics if isinstance(v, (int, float)) and not isinstance(v, bool)}
        trial.set_user_attr(METRICS, numbers)
        if outcome.was_pruned:
            raise optuna.TrialPruned
        return outcome.objective


def _directions(plan: SearchPlan) -> list[StudyDirection]:
    return [StudyDirection[direction.upper()] for direction in plan.directions]


def take_up(study: optuna.Study) -> int:
    """Queues interrupted trials to resume from their checkpoints; returns the number of trials that are done."""
    num_done = 0
    taken = {trial.user_attrs.get(GOES_ON, {}).get("number") for trial in study.trials}
    for trial in study.get_trials(deepcopy=False):
        is_cut_off = trial.user_attrs.get(INTERRUPTED, False)
        if trial.state == TrialState.RUNNING and _is_dead(trial.user_attrs.get(OWNER)):
            study.tell(trial.number, state=TrialState.FAIL)
            is_cut_off = True
        elif not trial.state.is_finished():
            continue
        if not is_cut_off:
            num_done += 1
        elif trial.number not in taken and trial.params:
            earlier = trial.user_attrs.get(GOES_ON, {}).get("folders", [])
            folders = [trial.user_attrs[FOLDER], *earlier] if FOLDER in trial.user_attrs else earlier
            # Adds a waiting trial with the attributes of its sampler, which `enqueue_trial` would drop.
            noted = {**trial.system_attrs, "fixed_params": trial.params}
            notes = {GOES_ON: {"number": trial.number, "folders": folders}}
            study.add_trial(create_trial(state=TrialState.WAITING, system_attrs=noted, user_attrs=notes))
    if study.trials:
        study.sampler.reseed_rng()  # a seeded sampler would repeat its earlier draws
    return num_done


def find_best(study: optuna.Study, attempts: TrialRunner) -> BestRun | list[BestRun]:
    """Returns the best trial of the study, including trials of earlier runs; SearchError if no trial was completed."""
    if not any(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False)):
        attempts.require_one()
        raise SearchError("No trial of the study was completed, so there is no best trial.")
    if len(study.directions) > 1:
        return [BestRun(str(one.number), one.values, one.params) for one in study.best_trials]
    best = study.best_trial
    return BestRun(str(best.number), best.value, best.params)  # type: ignore[arg-type]


def _ends(probe: optuna.Trial, params: Params) -> Iterator[tuple[str, object]]:
    """Yields the ends of ranges, and all choices, of values drawn under an argument's name."""
    for name, distribution in probe.distributions.items():
        if name not in params or params[name] != probe.params[name]:  # drawn under that name to make another value of
            continue
        if isinstance(distribution, CategoricalDistribution):
            yield from ((name, choice) for choice in distribution.choices)
        else:
            yield from ((name, getattr(distribution, end)) for end in ("low", "high"))


def _is_dead(owner: object) -> bool:
    """Returns True if the process that ran a trial has ended; False for processes of other machines."""
    if not isinstance(owner, list) or len(owner) != 2 or owner[0] != socket.gethostname():
        return False
    return owner[1] == os.getpid() or not is_process_alive(owner[1])
