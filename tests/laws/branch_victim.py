"""A branch that is killed after a step: `branch_victim.py FOLDER CHECKPOINT STEP`."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.laws.branch_runs import branch
from trainwright import TrainerCallback


class Dies(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    settings = {"max_steps": 14, "cooldown": "1-sqrt", "save_async": False}
    branch(Path(sys.argv[1]), Path(sys.argv[2]), callbacks=[Dies()], **settings)
