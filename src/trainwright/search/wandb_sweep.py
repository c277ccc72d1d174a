"""Weights & Biases sweeps: its service draws the trials, its agent asks for them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import wandb

from trainwright.errors import SearchSpaceError
from trainwright.search import base
from trainwright.search.base import BestRun, Objective, SearchPlan, TrainerHandle, Trial, TrialResult, TrialSpec
from trainwright.search.search_record import TrialRunner


class WandbBackend:
    """Runs trials that a sweep draws."""

    name = "wandb"
    tracker = "wandb"

    def __init__(self) -> None:
        self._mistake: Exception | None = None

    def check(self, host: TrainerHandle, plan: SearchPlan) -> None:
        base.check_options(plan.options, ("sweep_id", "project", "entity", "name", "metric"), backend=self.name)
        if plan.is_multi or plan.settings.resume_search:
            what = "several objectives" if plan.is_multi else "resume_search (pass sweep_id to continue a sweep)"
            raise SearchSpaceError(f"backend='wandb' has no {what}.")
        if host.num_processes > 1:
            raise SearchSpaceError("backend='wandb' trains in one process; backend='optuna' in several.")
        sweep = plan.space(None)
        if not isinstance(sweep, Mapping) or not isinstance(sweep.get("parameters"), Mapping):
            raise SearchSpaceError("hp_space must return a sweep's configuration, with 'method' and 'parameters'.")
        parameters = sweep["parameters"]
        base.check_names(host.args, parameters)
        values = [
            (name, value)
            for name, how in parameters.items()
            for value in (how.get("values") or [how[key] for key in ("value", "min", "max") if key in how])
        ]
        base.check_values(host.args, values)

    def report(self, trial: Trial, outcome: TrialResult, save: Callable[[str], None] | None) -> bool:
        """Does nothing: the tracker logs evaluations, and a sweep that ends a run early ends its process."""
        return False

    def frozen(self, offer: TrialSpec) -> Trial:
        return dict(offer.params)

    def run(self, host: TrainerHandle, plan: SearchPlan) -> BestRun:
        options = dict(plan.options)
        sweep = {**plan.space(None)}
        metric = options.get("metric", "eval/loss")
        sweep["metric"] = {**sweep.get("metric", {}), "goal": plan.directions[0], "name": metric}
        if options.get("name"):
            sweep["name"] = options["name"]
        attempts = TrialRunner(host, plan, backend=self.name)
        sweep_id = options.get("sweep_id") or wandb.sweep(
            sweep, project=options.get("project"), entity=options.get("entity")
        )

        def one() -> Objective:
            if self._mistake is not None:
                return None
            return self._attempt(attempts, metric, goes_on=plan.settings.failed_trials == "continue")

        wandb.agent(
            sweep_id, function=one, count=plan.num_trials, project=options.get("project"), entity=options.get("entity")
        )
        if self._mistake is not None:
            raise self._mistake
        attempts.require_one()
        best = attempts.record.best()[0]
        return BestRun(best.id, best.values[0], best.params, sweep_id)

    def _attempt(self, attempts: TrialRunner, metric: str, *, goes_on: bool) -> Objective:
        run: Trial = wandb.run if wandb.run is not None else wandb.init()
        others = ("assignments", "metric", "_wandb")
        params = {name: value for name, value in dict(run.config).items() if name not in others}
        run.config.update({"assignments": {}, "metric": metric}, allow_val_change=True)
        try:
            return attempts.run(TrialSpec(id=run.id, params=params, name=run.name), params).objective
        except Exception as error:  # the agent's thread would keep it for itself
            if not goes_on or isinstance(error, SearchSpaceError):
                self._mistake = error
            return None
