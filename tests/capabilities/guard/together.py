"""Bad steps in one of two processes, counted by both: `together.py FOLDER KIND`."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import trainwright
from tests._support.two_processes import tell
from tests.capabilities.guard.poisoned import POISONS, trainer
from tests.distributed.layouts import MODEL, in_parts, trainer_of

RANK = int(os.environ["RANK"])
CHUNK = 4  # samples of a step: two of each process
SAVES = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 1, "incidents": False, "max_steps": 8}
MANY = {"save_strategy": "steps", "save_steps": 60, "incidents": False, "max_steps": 120, "on_nonfinite": "skip"}


def bad_at(*steps: int) -> dict[int, dict[str, Any]]:
    """Poison in the last sample of each of these steps, which the second process has."""
    return {step * CHUNK - 1: POISONS["nan"] for step in steps}


def counts(folder: Path) -> None:
    """Skipped steps 1 and 5, with a resume between them."""
    data = {"poison": bad_at(1, 5), "size": 40}
    trainer(folder, settings={**SAVES, "max_steps": 3}, **data).train()
    again = trainer(folder, settings=SAVES, **data)
    again.train(resume_from_checkpoint=True)
    entries = [entry for entry in again.state.log_history if "loss" in entry]
    tell(counts={entry["step"]: entry["guard/skipped_steps"] for entry in entries})


def share(folder: Path, *, stop: int) -> None:
    """All steps but each tenth are bad: the run ends at its 51st bad step, also with a resume after `stop`."""
    data = {"poison": bad_at(*(step for step in range(1, 121) if step % 10)), "size": 480}
    if stop > 0:
        trainer(folder, settings={**MANY, "max_steps": stop, "save_steps": stop}, **data).train()
    trainer(folder, settings=MANY, **data).train(resume_from_checkpoint=stop > 0)


class BreaksItsPart(trainwright.TrainerCallback):
    """Writes NaN into the optimizer's state of the second process, of a parameter that both hold parts of."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 2 or RANK != 1:
            return
        named = kwargs["model"].named_parameters()
        weight = next(one for name, one in named if name.endswith("0.self_attn.q_proj.weight"))
        kwargs["optimizer"].state[weight]["exp_avg"].to_local().fill_(torch.nan)


def parts(folder: Path) -> None:
    """Two processes that share the layers of a model."""
    one = trainer_of(in_parts(folder.parent / MODEL, tp_size=2), folder, incidents=False, save_strategy="no")
    one.add_callback(BreaksItsPart())
    one.train()


KINDS: dict[str, Callable[[Path], None]] = {
    "counts": counts,
    "share": partial(share, stop=0),
    "resumed": partial(share, stop=30),
    "parts": parts,
}

if __name__ == "__main__":
    KINDS[sys.argv[2]](Path(sys.argv[1]) / sys.argv[2])
