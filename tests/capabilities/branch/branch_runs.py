"""Runs and their branches, for one process and for several."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from trainwright import TrainerCallback

from ...contract import doubles

STEPS = 12
AT = 6  # step of the checkpoint that branches begin from
END = 10  # of a cooldown


class Rates(TrainerCallback):
    """Notes the rate of each step, by its number; ends the run after the step `stops_after`."""

    def __init__(self, stops_after: int | None = None) -> None:
        self.of: dict[int, float] = {}
        self._stops_after = stops_after

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.of[state.global_step + 1] = float(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._stops_after:
            control.should_training_stop = True


class Dies(TrainerCallback):
    """Kills its process after a step."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def made(folder: Path, **settings: Any) -> tuple[Any, Rates]:
    rates = Rates(settings.pop("stops_after", None))
    callbacks = [rates, *settings.pop("callbacks", [])]
    resume = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
        "preflight": False,
        "incidents": False,
        "seed": 3,
    }
    data = {"train_dataset": settings.pop("train_dataset", doubles.samples())}
    if "eval_strategy" in settings:
        data["eval_dataset"] = doubles.samples(8)
    return doubles.trainer(folder, settings=resume | settings, callbacks=callbacks, **data), rates


def run(folder: Path, *, resume: Any = None, **settings: Any) -> tuple[Any, Rates]:
    trainer, rates = made(folder, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, rates


def branch(folder: Path, origin: Path, **settings: Any) -> tuple[Any, Rates]:
    return run(folder, branch_from=str(origin), **settings)
