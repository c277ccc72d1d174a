"""Two processes whose weights become NaN in step 3, and their checkpoints: `sharded_saves.py FOLDER ENGINE`."""

import os
import sys
from pathlib import Path

from tests._support.two_processes import tell
from tests.guard.matrix import ENGINES
from tests.guard.poisoned import POISONS, trained
from trainwright.checkpoint.store import CheckpointStore, non_finite_mark

SAVES = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
RUNS = {
    "asynchronous": {"on_nonfinite": "warn", "save_async": True},
    "at once": {"on_nonfinite": "warn", "save_async": False},
    "marked": {"on_nonfinite": "ignore", "save_async": True},
    "skipped": {"save_async": True},
}

if __name__ == "__main__":
    folder, engine = Path(sys.argv[1]), sys.argv[2]
    settings = ENGINES[engine]
    if engine == "fsdp":
        settings = {**settings, "fsdp_config": {**settings["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}}
    for name, how in RUNS.items():
        rows = 2 * int(os.environ["WORLD_SIZE"])
        one = trained(folder / name, poison={3 * rows - 1: POISONS["nan"]}, settings={**SAVES, **settings, **how})
        store = CheckpointStore(folder / name)
        bad = sorted(store.non_finite())
        marks = {non_finite_mark(store.path(step)) for step in bad}
        newest = one._checkpointer.writer.newest  # the same in all processes, or they would wait for each other
        tell(**{name: {"steps": store.steps(), "bad": bad, "marks": sorted(map(str, marks)), "newest": newest}})
