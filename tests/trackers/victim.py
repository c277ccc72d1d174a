"""A training that is killed while its tracker is behind, or one that goes on after it.

python victim.py FOLDER SERVICE killed|resumed
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tests._support.small import make_trainer
from tests.trackers.test_tracker_laws import SETTINGS

from trainwright import TrainerCallback
from trainwright.trackers import base
from trainwright.trackers.registry import get_reporting_integration_callbacks


class Dies(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, service: str, word: str) -> None:
    base.FLUSH_TIMEOUT_S = 60.0
    (kind,) = get_reporting_integration_callbacks(service)
    send = kind.send
    arrived = threading.Event()

    def falls_behind(self: Any, values: dict[str, Any], state: Any) -> None:
        if state.global_step > 2:
            threading.Event().wait()
        send(self, values, state)
        if state.global_step == 2:
            arrived.set()

    class Waits(TrainerCallback):
        """What was sent before has arrived when the tracker falls behind."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert state.global_step < 2 or arrived.wait(60)

    is_killed = word == "killed"
    if is_killed:
        kind.send = falls_behind
    callbacks = [Waits(), Dies()] if is_killed else []
    settings = SETTINGS | {"logging_steps": 1, "save_async": False}
    trainer = make_trainer(Path(folder) / "run", callbacks=callbacks, report_to=[service], **settings)
    trainer.train(resume_from_checkpoint=not is_killed)


if __name__ == "__main__":
    main(*sys.argv[1:])
