"""The process that copies to a store, or its run, is killed, stopped or signalled in each phase: no copy is lost.

Afterwards the run is started again if it has not got to its end, the newest checkpoint is at the URL, and no process is
left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from trainwright.capabilities.mirror.remote import RemoteStore

from .._support import forked
from .test_random_faults import processes_in

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

LAST = 6
REAL_S = 60.0
SCRIPT = f"""
import os
log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1)
os.dup2(log, 2)
import torch
from pathlib import Path
from trainwright import TrainerCallback
from tests.contract import doubles

class Says(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == {LAST}:
            Path("last-step").touch()

class Large(doubles.Regressor):
    def __init__(self):
        super().__init__()
        self.register_buffer("ballast", torch.zeros(3_000_000))

settings = {{
    "max_steps": {LAST}, "save_strategy": "steps", "save_steps": 3, "mirror_max_mb_per_s": 8,
    "checkpoint_mirror": Path("store").absolute().as_uri(), "dataloader_num_workers": 1,
}}
trainer = doubles.trainer("run", model=Large(), settings=settings, callbacks=[Says()])
trainer.train(resume_from_checkpoint="auto")
"""


def left_in(folder: Path) -> list[int]:
    return [one for one in processes_in(folder) if one != os.getpid()]


def copier(folder: Path) -> psutil.Process | None:
    """The process that copies, if there is one."""
    for one in left_in(folder):
        with suppress(psutil.Error):
            found = psutil.Process(one)
            if "trainwright.capabilities.mirror.store_process" in found.cmdline():
                return found
    return None


PHASES: dict[str, Callable[[Path], bool]] = {
    "starting": lambda folder: copier(folder) is not None,
    "uploading": lambda folder: any(folder.glob("store/checkpoint-*/.upload")),
    "ending": lambda folder: (folder / "last-step").exists(),
}


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + REAL_S
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@contextmanager
def started(folder: Path) -> Iterator[forked.Process]:
    process = forked.start(["-c", SCRIPT], cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(REAL_S)


def strike_copier(folder: Path, number: signal.Signals) -> None:
    found = copier(folder)
    if found is None:
        return
    with suppress(psutil.Error):
        found.send_signal(number)
        if number == signal.SIGSTOP:
            time.sleep(1.5)
            found.send_signal(signal.SIGCONT)


FAULTS = [
    ("run", signal.SIGKILL),
    ("run", signal.SIGTERM),
    ("run", signal.SIGINT),
    ("run", signal.SIGSTOP),
    ("copier", signal.SIGKILL),
    ("copier", signal.SIGSTOP),
    ("copier", signal.SIGTERM),
]


@pytest.mark.parametrize(
    ("who", "number", "phase"),
    [
        pytest.param(
            *fault, phase, marks=[] if (fault[1], phase) == (signal.SIGKILL, "uploading") else pytest.mark.slow
        )
        for fault in FAULTS
        for phase in PHASES
    ],
)
def test_a_fault_in_any_phase_loses_no_copy_and_leaves_no_process(
    who: str, number: signal.Signals, phase: str, tmp_path: Path
) -> None:
    with started(tmp_path) as process:
        until(lambda: PHASES[phase](tmp_path), phase)
        if who == "copier":
            strike_copier(tmp_path, number)
        else:
            process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(1.5)
                process.send_signal(signal.SIGCONT)
        code = process.wait(REAL_S)
    log = (tmp_path / "log").read_text()
    if who == "copier" or number == signal.SIGSTOP:
        assert code == 0, log
    until(lambda: not left_in(tmp_path), "a process is left")
    if code != 0:
        with started(tmp_path) as process:
            assert process.wait(REAL_S) == 0, (tmp_path / "log").read_text()
    store = RemoteStore((tmp_path / "store").as_uri())
    newest = store.manifests()[0]
    assert newest.step == LAST, log
    assert list(store.problems(newest)) == []
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith("_mirror")]
    until(lambda: not left_in(tmp_path), "a process is left")
    assert log.count("SIGKILL") <= 1, log
