"""A run in several processes that is killed: `long_context_victim.py FOLDER KIND [RANK COUNT]`.

It resumes where there is a checkpoint, and notes each step that begins in `FOLDER/steps`. With a RANK, that process
kills itself when it comes by for the COUNT-th time at a place of a save (see `tests/chaos/victim.py`).
"""

import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests._support.two_processes import tell
from tests.chaos.victim import Countdown, patch_the_system
from tests.laws.long_context import outcome, trainer_of
from tests.laws.long_context_kinds import KINDS
from trainwright import TrainerCallback

NUM_STEPS = 7


class Killing(Countdown):
    def at(self, place: str) -> None:
        self.count -= 1
        if self.count == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Notes(TrainerCallback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / str(state.global_step + 1)).touch()


folder = Path(sys.argv[1])
kind = KINDS[sys.argv[2]]
if len(sys.argv) > 3 and os.environ["RANK"] == sys.argv[3]:
    patch_the_system(Killing("anywhere", int(sys.argv[4])))
logging.getLogger("trainwright").setLevel("ERROR")
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
torch.manual_seed(0)
settings = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": NUM_STEPS}
saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
trainer = trainer_of(kind.cell, folder / "run", **settings, **saves, **kind.settings)
trainer.add_callback(Notes(folder / "steps"))
tell(outcome=outcome(trainer, resume_from_checkpoint="auto"))
