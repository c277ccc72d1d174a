"""Branches in two processes: `branch_of_two.py FOLDER BACKEND trunk|branches|killed`. The test beside it judges."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

from tests._support.two_processes import tell
from tests.capabilities.averages.average_runs import BACKENDS
from tests.capabilities.branch.branch_runs import AT, END, STEPS, Dies, branch, run
from tests.contract import doubles
from trainwright.capabilities.branch.origins import origins_in
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.weights import load_weights
from trainwright.engine import sharded_state

FOLDER = Path(sys.argv[1])
SETTINGS = {"per_device_train_batch_size": 2, **BACKENDS[sys.argv[2]]}


def weights(name: str, step: int) -> dict[str, Any]:
    """The weights of a checkpoint, as numbers."""
    folder = FOLDER / name / f"checkpoint-{step}"
    found = sharded_state.read_weights(folder) if sharded_state.has_weights(folder) else None
    model = doubles.model()
    load_weights(model, folder, found=found)
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def origins(name: str, step: int) -> list[int]:
    """The steps that the run of a checkpoint branched at."""
    return [origin["step"] for origin in origins_in(Checkpoint(FOLDER / name / f"checkpoint-{step}"))]


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`")
    if sys.argv[3] == "trunk":
        run(FOLDER / "trunk", **SETTINGS)
        sys.exit()
    origin = FOLDER / "trunk" / f"checkpoint-{AT}"
    cooled = {"max_steps": END, "cooldown": "linear"} | SETTINGS
    if sys.argv[3] == "killed":  # in its last step, after the checkpoint of step 8
        callbacks = [Dies(at=END - 1)] if os.environ["RANK"] == "1" else []
        branch(FOLDER / "killed", origin, callbacks=callbacks, save_async=False, **cooled)
    rates = {
        "same": branch(FOLDER / "same", origin, **SETTINGS)[1],
        "cooled": branch(FOLDER / "cooled", origin, **cooled)[1],
        "cut": branch(FOLDER / "cut", origin, stops_after=8, **cooled)[1],
        "resumed": branch(FOLDER / "cut", origin, **cooled)[1],
        "killed": branch(FOLDER / "killed", origin, **cooled)[1],
    }
    found = {"trunk": weights("trunk", STEPS), "same": weights("same", STEPS), "cooled": weights("cooled", END)}
    found["resumed"] = weights("cut", END)
    found["killed"] = weights("killed", END)
    tell(
        rates={name: list(one.of.values()) for name, one in rates.items()},
        weights=found,
        origins={name: origins(name, END) for name in ("cooled", "cut", "killed")},
    )
