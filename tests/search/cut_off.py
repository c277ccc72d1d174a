"""A search to cut off: `cut_off.py FOLDER`. It says HERE in the fourth step of the third trial, and waits there."""

import json
import sys
from pathlib import Path
from typing import Any

import optuna
import torch

from tests._support.arrival import announce
from tests._support.small import make_trainer
from tests.search.small import asked_parts, rates, scale
from trainwright import Trainer

FOLDER = Path(sys.argv[1])
WAITS = not (FOLDER / "search.json").exists() and "whole" not in sys.argv


class Watched(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if WAITS and self._trial is not None and self._trial.number == 2 and self.state.global_step == 3:
            announce()
        return super().training_step(*args, **kwargs)


settings = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
trainer = make_trainer(FOLDER, cls=Watched, save_async=False, **asked_parts(), **settings)
grid = [rate * scale() for rate in (1e-3, 3e-3, 1e-2, 3e-2)]
best = trainer.hyperparameter_search(
    rates,
    n_trials=4,
    storage=f"sqlite:///{FOLDER}/study.db",
    sampler=optuna.samplers.GridSampler({"learning_rate": grid}, seed=0),
    resume_search=True,
)
(FOLDER / "best.json").write_text(json.dumps([best.objective, best.hyperparameters]))
