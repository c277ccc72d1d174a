"""A run of two processes that gets commands: `control_of_two.py FOLDER BACKEND`. The test beside it judges."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from tests._support.two_processes import tell
from tests.capabilities.averages.average_runs import BACKENDS, weights_of
from tests.contract import doubles
from trainwright import TrainerCallback
from trainwright.capabilities.control.inbox import Inbox

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
STEPS = 1500  # at most; the run ends some steps after the command, however busy the machine is
STEPS_AFTER = 5


class Sends(TrainerCallback):
    """Sends commands after step 3; notes rate and steps. Steps take 50 ms from then on, so that seconds pass."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])
        if state.global_step == 3 and RANK == 0:
            for words in (["lr", 3e-4], ["save"]):
                Inbox(FOLDER).send({"words": words, "by": "a test"})
        if state.global_step >= 3:
            time.sleep(0.05)
        control.should_training_stop = self.rates.count(3e-4) == STEPS_AFTER  # in both processes after the same step


if __name__ == "__main__":
    sends = Sends()
    settings = {
        "live_control": True,
        "max_steps": STEPS,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": STEPS,
        "logging_steps": STEPS,
        **BACKENDS[sys.argv[2]],
    }
    trainer = doubles.trainer(FOLDER, settings=settings, callbacks=[sends])
    trainer.train()
    saved = sorted(path.name for path in FOLDER.glob("checkpoint-*"))
    tell(rates=sends.rates, weights=weights_of(trainer), saved=saved)
