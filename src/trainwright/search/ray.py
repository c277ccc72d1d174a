"""Ray Tune: trials side by side in processes of their own, which receive a function that makes the trainer again."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import ray
import ray.tune
from ray.tune.schedulers import FIFOScheduler

from trainwright._types import JSONObject, json_value, write_text
from trainwright.config.coerce import output_path
from trainwright.config.fields import get_value
from trainwright.distributed.device import ray_resources
from trainwright.errors import SearchError, SearchSpaceError
from trainwright.search import base, search_record
from trainwright.search.base import BestRun, Params, SearchPlan, TrainerHandle, Trial, TrialResult, TrialSpec
from trainwright.search.search_record import SearchRecord, TrialRecord, remove_model
from trainwright.support.door import read_json

OBJECTIVE = "objective"
TRIAL_NAME = "trial.json"  # in a trial's directory: its outcome, written by its own process
OURS = ("run_or_experiment", "config", "num_samples", "metric", "mode")
DRAWS = 5  # sample draws of each domain, to see its type of value


class RayBackend:
    """Runs trials that Ray draws, schedules and moves."""

    name = "ray"
    tracker = None

    def check(self, host: TrainerHandle, plan: SearchPlan) -> None:
        known = [name for name in inspect.signature(ray.tune.run).parameters if name not in OURS]
        base.check_options(plan.options, known, backend=self.name)
        if host.num_processes > 1:
            raise SearchSpaceError(
                "backend='ray' starts the processes of its trials itself. Run the script without a launcher."
            )
        if plan.is_multi or plan.settings.resume_search:
            what = "several objectives" if plan.is_multi else "resume_search"
            raise SearchSpaceError(f"backend='ray' has no {what}; backend='optuna' has.")
        scheduler = plan.options.get("scheduler")
        is_plain = scheduler is None or type(scheduler) is FIFOScheduler
        if not is_plain and host.args.eval_strategy == "no":
            raise SearchSpaceError(
                f"scheduler={type(scheduler).__name__} decides by evaluations in training, and eval_strategy='no'. "
                "Set it to 'steps' or 'epoch'."
            )
        domains = plan.space(None)
        base.check_names(host.args, domains)
        base.check_values(host.args, _draws(domains))

    def report(self, trial: Trial, outcome: TrialResult, save: Callable[[str], None] | None) -> bool:
        """Reports metrics and checkpoint to Ray, which ends the process of a pruned trial itself."""
        metrics = {**outcome.metrics, OBJECTIVE: outcome.objective}
        with tempfile.TemporaryDirectory() as folder:
            if save is not None:
                save(folder)
            checkpoint = None if save is None else ray.tune.Checkpoint.from_directory(folder)
            ray.tune.report(metrics, checkpoint=checkpoint)
        return False

    def frozen(self, offer: TrialSpec) -> Trial:
        return dict(offer.params)

    def run(self, host: TrainerHandle, plan: SearchPlan) -> BestRun:
        folder = output_path(host.args)
        options = {
            "resources_per_trial": {"cpu": 1, **ray_resources()},
            "progress_reporter": ray.tune.CLIReporter(metric_columns=[OBJECTIVE]),
            "storage_path": os.path.join(folder, "ray"),
            "raise_on_failed_trial": plan.settings.failed_trials == "stop",
            **plan.options,
        }
        trainable = ray.tune.with_parameters(train_one, make=host.pack())
        analysis = ray.tune.run(trainable, config=dict(plan.space(None)), num_samples=plan.num_trials, **options)
        found = SearchRecord(directions=list(plan.directions), backend=self.name)
        for trial in analysis.trials:
            found.add(
                _make_record(trial, host.folder_of(TrialSpec(id=trial.trial_id, params=trial.config), trial.config))
            )
        found.write(folder)
        scope = os.environ.get("RAY_SCOPE") or get_value(host.args, "ray_scope")
        best = analysis.get_best_trial(metric=OBJECTIVE, mode=plan.directions[0][:3], scope=scope)
        if best is None:
            raise SearchError("\n  ".join([f"None of {len(found.trials)} trials has an objective.", *found.errors()]))
        for one in found.trials:
            if one.id != best.trial_id:
                remove_model(folder, one.folder)
        return BestRun(best.trial_id, best.last_result[OBJECTIVE], best.config, analysis)


def train_one(config: JSONObject, make: Callable[[], TrainerHandle]) -> None:
    """Runs a trial in its own process, with the trainer of `make`; resumes from its checkpoint where Ray moved it."""
    host = make()
    given = ray.tune.get_checkpoint()
    with nullcontext() if given is None else given.as_directory() as folder:
        checkpoint = None if folder is None else host.find_checkpoint(folder)
        offer = TrialSpec(id=ray.tune.get_context().get_trial_id(), params=config, checkpoint=checkpoint)
        outcome = host.run(offer, dict(config))
    entry = search_record.finished(offer.id, json_value(config), outcome)
    (Path(outcome.folder) / TRIAL_NAME).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(outcome.folder) / TRIAL_NAME, json.dumps(json_value(dataclasses.asdict(entry))))
    if not outcome.was_heard and given is None:  # a trial that was moved at its end has reported already
        ray.tune.report({**outcome.metrics, OBJECTIVE: outcome.objective})


def _make_record(trial: Trial, folder: str) -> TrialRecord:
    """Returns the record of a trial: as it wrote it itself, or from its reports if it was ended."""
    seconds = (trial.last_result or {}).get("time_total_s")
    path = Path(folder) / TRIAL_NAME
    if path.is_file():
        known = TrialRecord.parse(read_json(path, max_bytes=search_record.MAX_BYTES))
        return dataclasses.replace(known, id=trial.trial_id, folder=folder, seconds=seconds)
    objective = (trial.last_result or {}).get(OBJECTIVE)
    error = trial.get_pickled_error() if trial.status == "ERROR" else None
    return TrialRecord(
        id=trial.trial_id,
        state=search_record.FAILED if trial.status == "ERROR" else search_record.PRUNED,
        params=json_value(trial.config),
        values=[] if objective is None else [float(objective)],
        error=None if trial.status != "ERROR" else str(error or "it failed").strip().splitlines()[-1],
        folder=folder,
        seconds=seconds,
    )


def _draws(domains: Params) -> Iterator[tuple[str, object]]:
    """Yields values of each domain: all listed ones, or samples."""
    for name, domain in domains.items():
        if isinstance(domain, Mapping) and "grid_search" in domain:
            yield from ((name, value) for value in domain["grid_search"])
        elif hasattr(domain, "categories"):
            yield from ((name, value) for value in domain.categories)
        elif hasattr(domain, "sample"):
            yield from ((name, domain.sample()) for _ in range(DRAWS))
        else:
            yield name, domain
