"""Trains until the process kills itself right before a step: `killed.py FOLDER STEP`."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import trainwright
from tests.capabilities.guard.poisoned import BATCH, POISONS, Hears, trainer

SPIKE_STEP = 8
BAD_STEP = 9
POISON = {(SPIKE_STEP - 1) * BATCH: {"labels": 1e6}, (BAD_STEP - 1) * BATCH: POISONS["nan"]}
SETTINGS = {
    "max_steps": 12,
    "logging_steps": 12,
    "spike_warmup": 5,
    "spike_window": 7,
    "spike_threshold": 100.0,
    "on_spike": "skip",
    "save_strategy": "steps",
    "save_steps": 1,
    "save_async": False,
}


class Kills(trainwright.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, *callbacks: Any) -> tuple[dict[str, torch.Tensor], list[tuple[int, str]]]:
    """Trains from the newest checkpoint, if there is one; the weights at the end, and what was heard."""
    hears = Hears()
    one = trainer(folder, poison=POISON, settings=SETTINGS, callbacks=[hears, *callbacks])
    one.train(resume_from_checkpoint=(folder / "checkpoint-1").exists())
    return one.model.state_dict(), [(incident.step, incident.kind) for incident in hears.incidents]


if __name__ == "__main__":
    train(Path(sys.argv[1]), Kills(int(sys.argv[2])))
