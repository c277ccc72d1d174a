"""Two processes that write parts of a checkpoint behind training's back: `parts_behind.py FOLDER [killed]`."""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests._support.two_processes import tell
from tests.distributed.cases import trainer_of
from tests.distributed.shards import SAVED, outcome_of_parts
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from trainwright import TrainerCallback
from trainwright.checkpoint import deferred_io
from trainwright.engine import sharded_state

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
write_parts = sharded_state._write
write_data = FileSystemWriter.write_data
memory = deferred_io.available_bytes
SHARDED = {
    "fsdp": True,
    "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"},
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 6,
    "save_total_limit": None,
}


class Steps(TrainerCallback):
    """Tells another thread that training is further than the step it knows."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.changed:
            self.step = state.global_step
            self.changed.notify_all()

    def wait_for(self, step: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.step >= step, timeout=60)


def trainer_in(name: str, **settings: Any) -> Any:
    return trainer_of(SAVED, FOLDER / name, 2, **SHARDED, **settings)


def apart() -> None:
    """What is written is what was when the save began, though training has gone on."""
    steps = Steps()
    seen = []

    def waits(state: Any, folder: Path, group: Any) -> None:
        step = int(folder.parent.name.split("-")[1].split(".")[0])
        seen.append([threading.current_thread().name, steps.wait_for(min(step + 1, 6))])
        write_parts(state, folder, group)

    sharded_state._write = waits
    trainer = trainer_in("behind", save_async=True)
    trainer.add_callback(steps)
    trainer.train()
    sharded_state._write = write_parts
    trainer_in("blocking", save_async=False).train()
    tell(apart=seen)


def goes_on() -> None:
    again = trainer_in("resumed")
    tell(resumed=outcome_of_parts(again, resume_from_checkpoint=str(FOLDER / "behind/checkpoint-2")))
    tell(whole=outcome_of_parts(trainer_in("whole")))


def short_of_memory() -> None:
    """One process has no room for a copy, so none makes one."""
    names = []

    def notes(state: Any, folder: Path, group: Any) -> None:
        names.append(threading.current_thread().name)
        write_parts(state, folder, group)

    sharded_state._write = notes
    if RANK == 1:
        deferred_io.available_bytes = lambda: 0
    trainer_in("short", save_async=True).train()
    sharded_state._write = write_parts
    deferred_io.available_bytes = memory
    tell(short=names)


def disk_full() -> None:
    """The part of one process cannot be written."""

    def fails(self: Any, *args: Any) -> Any:
        if RANK == 1 and "checkpoint-4" in str(self.path):
            raise OSError(28, "No space left on device")
        return write_data(self, *args)

    FileSystemWriter.write_data = fails  # type: ignore[method-assign]
    trainer_in("continued", save_async=True, save_failure="continue").train()
    try:
        trainer_in("stopped", save_async=True).train()
    except Exception as error:
        tell(stopped=f"{type(error).__name__}: {error}")
    FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def killed() -> None:
    """One process dies while the parts of step 4 are written and training is at a later step."""

    def dies(state: Any, folder: Path, group: Any) -> None:
        if RANK == 1 and "checkpoint-4" in str(folder):
            assert steps.wait_for(5)
            os.kill(os.getpid(), signal.SIGKILL)
        write_parts(state, folder, group)

    steps = Steps()
    sharded_state._write = dies
    trainer = trainer_in("killed", save_async=True)
    trainer.add_callback(steps)
    trainer.train()
    time.sleep(60)


logging.getLogger("trainwright").setLevel("CRITICAL")
for work in [killed] if "killed" in sys.argv else [apart, goes_on, short_of_memory, disk_full]:
    work()
tell(done=True)
