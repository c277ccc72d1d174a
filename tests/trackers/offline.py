"""Trains with a tracker whose client writes to files: `offline.py NAME FOLDER [cut]`; "cut" raises at step 4."""

import os
import sys
from pathlib import Path
from typing import Any

NAME = sys.argv[1]
FOLDER = Path(sys.argv[2])
IS_CUT = "cut" in sys.argv
# Clients read their variables when they are imported.
os.environ.update(
    HOME=str(FOLDER),
    COMET_START_ONLINE="0",
    COMET_OFFLINE_DIRECTORY=str(FOLDER / "comet"),
    COMET_PROJECT_NAME="tests",
)

from tests._support.small import data, make_trainer  # noqa: E402

from trainwright import TrainerCallback  # noqa: E402


class Cut(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if IS_CUT and state.global_step == 4:
            raise RuntimeError("cut")


if __name__ == "__main__":  # a client may start a process of its own, which reads this file again
    trainer = make_trainer(
        FOLDER / "run",
        max_steps=6,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        eval_dataset=data.vectors(4),
        report_to=NAME,
        callbacks=[Cut()],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer.train(resume_from_checkpoint="auto")
