"""The peak of a step in each of several processes, as the allocator counts it, and the bytes of its checkpoint.

Everything from the model on is made while torch's profiler watches, so its running sum is what is allocated.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests._support.small import make_trainer
from tests._support.two_processes import tell
from tests.preflight.memory_cases import CASES
from torch.profiler import ProfilerActivity, profile, record_function

from trainwright import TrainerCallback

FOLDER = Path(sys.argv[1])
TABLE: dict[str, tuple[str, dict[str, Any]]] = json.loads(sys.argv[2])  # name -> case, settings
STEP = 3  # the first whose steps before have made all that stays


class Marks(TrainerCallback):
    """Marks one step in the profile."""

    def __init__(self) -> None:
        self._mark = record_function("the step")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            self._mark.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP:
            self._mark.__exit__(None, None, None)


def peak_of(events: Any) -> int:
    [step] = [event for event in events if event.name() == "the step"]
    now = highest = 0
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        if event.start_ns() > step.start_ns():
            highest = max(highest, now)
        now += event.nbytes()
        if event.start_ns() > step.end_ns():
            break
    return highest


def calls_of(events: Any) -> dict[str, int]:
    """Collective operations within the step."""
    [step] = [event for event in events if event.name() == "the step"]
    names = [one.name() for one in events if step.start_ns() <= one.start_ns() <= step.end_ns()]
    return {name: names.count(name) for name in sorted(set(names)) if name.startswith("c10d::")}


for number, (name, (case_name, settings)) in enumerate(TABLE.items()):
    case = CASES[case_name]
    folder = FOLDER / str(number)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        torch.manual_seed(0)
        chosen = {"per_device_train_batch_size": 8, "max_steps": STEP + 1, "logging_steps": 10, "save_strategy": "no"}
        chosen |= {"hang_timeout": 120, **case.settings, **settings}
        trainer = make_trainer(
            folder, model=case.model(), train_dataset=case.data() * 4, preflight=False, callbacks=[Marks()], **chosen
        )
        trainer.train()
    events = watched.profiler.kineto_results.events()
    found = {"peak": peak_of(events), "calls": calls_of(events)}
    trainer._save_checkpoint(trainer.model, None)
    if os.environ["RANK"] == "0":
        [saved] = folder.glob("checkpoint-*")
        files = [path for path in saved.rglob("*") if path.suffix in (".safetensors", ".pt", ".distcp", ".bin")]
        found["saved"] = sum(path.stat().st_size for path in files)
    tell(**{name: found})
