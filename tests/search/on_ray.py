"""Searches on a local cluster of Ray: `on_ray.py FOLDER CASE`. Writes what came of it to `told.json`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

from tests._support.small import differing, make_trainer, weights
from tests.search.small import asked_parts, scale
from trainwright import Trainer

FOLDER = Path(sys.argv[1])
CASE = sys.argv[2]
RATES = [rate * scale() for rate in (1e-4, 1e-3, 1e-2, 3e-2)]


class FailsOnce(Trainer):
    """One of the rates cannot be trained with."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.learning_rate == RATES[1] and self.state.global_step == 2:
            raise ZeroDivisionError("a step went wrong")
        return super().training_step(*args, **kwargs)


def trainer(folder: Path, cls: Any = None, **settings: Any) -> Any:
    given = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 8}
    return make_trainer(folder, cls=cls, **asked_parts(), **given | settings)


def plain() -> dict[str, Any]:
    """A grid, one trial fails, the best one's model is loaded."""
    searching = trainer(FOLDER / "s", FailsOnce)
    given = dict(vars(searching.args))
    best = searching.hyperparameter_search(
        lambda _: {"learning_rate": ray.tune.grid_search(RATES), "seed": 7},
        backend="ray",
        n_trials=1,
        load_best_trial=True,
        resources_per_trial={"cpu": 1},
        verbose=0,
    )
    alone = trainer(FOLDER / "alone", learning_rate=best.hyperparameters["learning_rate"], seed=7)
    alone.train()
    return {
        "best": [best.run_id, best.objective, best.hyperparameters],
        "summary": len(best.run_summary.trials),
        "same": differing(weights(searching.model), weights(alone.model)) == {},
        "loaded": searching.evaluate()["eval_loss"],
        "untouched": vars(searching.args) == given,
    }


def asha() -> dict[str, Any]:
    """Trials of one evaluation after the other are stopped half-way."""
    scheduler = ASHAScheduler(metric="objective", mode="min", grace_period=1, reduction_factor=2, max_t=8)
    best = trainer(FOLDER / "s").hyperparameter_search(
        lambda _: {"learning_rate": ray.tune.grid_search(RATES[::-2])},
        backend="ray",
        n_trials=1,
        scheduler=scheduler,
        max_concurrent_trials=1,
        verbose=0,
    )
    return {"best": [best.run_id, best.objective, best.hyperparameters]}


def pbt() -> dict[str, Any]:
    """The worse of two takes over the weights, the optimizer and the position of the better one."""
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="objective",
        mode="min",
        perturbation_interval=1,
        synch=True,
        quantile_fraction=0.5,
        hyperparam_mutations={"learning_rate": RATES[1:3]},
        resample_probability=0.0,
    )
    best = trainer(FOLDER / "s", save_steps=2).hyperparameter_search(
        lambda _: {"learning_rate": ray.tune.grid_search([RATES[0] / 10, RATES[3]])},
        backend="ray",
        n_trials=1,
        scheduler=scheduler,
        verbose=0,
    )
    found = sorted((FOLDER / "s" / "ray").glob("*/train_one_*/checkpoint_*/checkpoint-8/trainer_state.json"))
    logs = [json.loads(path.read_text())["log_history"] for path in found]
    return {
        "best": [best.run_id, best.objective, best.hyperparameters],
        "perturbed": scheduler._num_perturbations,
        "rates": [[entry["learning_rate"] for entry in log if "learning_rate" in entry] for log in logs],
    }


os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
ray.init(
    num_cpus=2,
    include_dashboard=False,
    log_to_driver=True,
    logging_level="ERROR",
    object_store_memory=100 * 1024 * 1024,
)
(FOLDER / "told.json").write_text(json.dumps({"plain": plain, "asha": asha, "pbt": pbt}[CASE]()))
ray.shutdown()
