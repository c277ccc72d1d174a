"""Two processes, a weight that becomes NaN in step 3, and their checkpoints: `sharded_saves.py FOLDER ENGINE`.

With FSDP it is one in the shard of the second process, and the first one commits.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

import trainwright
from tests._support.two_processes import tell
from tests.capabilities.guard.matrix import ENGINES
from tests.capabilities.guard.poisoned import trained
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.store import CheckpointStore

SAVES = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "incidents": False}
RUNS = {
    "asynchronous": {"on_nonfinite": "warn", "save_async": True},  # "skip" would end the run at step 4
    "at once": {"on_nonfinite": "warn", "save_async": False},
    "marked": {"on_nonfinite": "ignore", "save_async": True},
}


class Breaks(trainwright.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weight = next(kwargs["model"].parameters()).detach()
        is_sharded = hasattr(weight, "to_local")
        if state.global_step == 3 and (not is_sharded or os.environ["RANK"] == "1"):
            (weight.to_local() if is_sharded else weight)[0, 0] = torch.nan


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    engine = sys.argv[2]
    settings = ENGINES[engine]
    if engine == "fsdp":
        settings = {**settings, "fsdp_config": {**settings["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}}
    for name, how in RUNS.items():
        one = trained(folder / name, settings={**SAVES, **settings, **how}, callbacks=[Breaks()])
        store = CheckpointStore(folder / name)
        bad = sorted(store.non_finite())
        marks = sorted({str(Checkpoint(store.path(step)).non_finite_mark) for step in bad})
        newest = one._trainwright.services.writer.newest  # the same in all processes, or they would wait for each other
        tell(**{name: {"steps": store.steps(), "bad": bad, "marks": marks, "newest": newest}})
