"""Runs with one capability and one fault, each in a fork: FOLDER MEMBER. The last line is what was found, as JSON.

A fault strikes in the middle of the calls of one event of the capability's extension, or of a step.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainwright import TrainerCallback
from trainwright.capabilities.async_evaluation import capability
from trainwright.loop.extension import EVENTS, Extension

from ..capabilities.async_evaluation.async_evaluations import Held
from ..chaos.test_random_faults import differing
from ..contract import doubles
from .test_extension_laws import MEMBERS, Seen, made

STEPS = 5
CLOCKS = ("_runtime", "_per_second")
LITTLE = 512  # bytes of the longest file on a full disk
LIMIT_S = 60
Calls = dict[str, int]


class Gone(BaseException):
    """What no `except Exception` catches."""


def raise_gone() -> None:
    raise Gone


def fill_the_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LITTLE, resource.RLIM_INFINITY))


STRIKES: dict[str, Callable[[], None]] = {
    "killed": lambda: os._exit(137),
    "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "BaseException": raise_gone,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "disk full": fill_the_disk,
}
IN_EACH_PHASE = ("killed", "signal", "BaseException")  # the others strike at the end of a step


def trainer_of(folder: Path, name: str) -> Any:
    more: dict[str, Any] = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_async": False,
        "logging_steps": 1,
    }
    if name == "mirror":
        more["checkpoint_mirror"] = f"file://{folder}/copies"
    trainer = made(folder / "run", name, **more)
    trunk = folder / "run-trunk" / "checkpoint-1"
    if name == "branch" and trunk.is_dir():
        trainer.args.branch_from = str(trunk)
    else:
        MEMBERS[name].prepare(trainer)
    return trainer


class Strikes(TrainerCallback):
    """Counts the calls of each event of an extension, and strikes at one of them, or at the end of a step."""

    def __init__(self, name: str, event: str = "", at: int = 0, strike: Callable[[], None] = lambda: None) -> None:
        self.calls: Calls = {}
        self.name = name
        self.event = event
        self.at = at
        self.strike = strike

    def watch(self, kind: type) -> None:
        """Watches the events that the class of an extension listens to."""
        for event in (*EVENTS, "save", "load"):
            original = getattr(kind, event, None)
            if callable(original) and original is not getattr(Extension, event, None):
                setattr(kind, event, self._watching(event, original))

    def _watching(self, event: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[event] = self.calls.get(event, 0) + 1
            if event == self.event and self.calls[event] == self.at:
                self.strike()
            return original(*args, **kwargs)

        return call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.event == "step" and state.global_step == self.at:
            self.strike()


def records_of(trainer: Any) -> list[Any]:
    """What a run recorded, in the order of steps: an evaluation beside the training comes when it is ready."""
    entries = [entry for entry in trainer.state.log_history if "train_loss" not in entry]
    timeless = [{key: entry[key] for key in sorted(entry) if not key.endswith(CLOCKS)} for entry in entries]
    timeless.sort(key=lambda entry: (entry["step"], *entry))
    path = Path(trainer.args.output_dir) / "ledger.parquet"
    if path.is_file():
        import pyarrow.parquet

        timeless += sorted(pyarrow.parquet.read_table(path).to_pylist(), key=lambda row: row["sample"])
    return [*timeless, trainer.state.global_step]


def live(folder: Path, name: str, kinds: list[type], strikes: Strikes) -> None:
    """Trains to the end or the fault, and writes what came out."""
    capability.evaluation_process = Held().instead_of  # type: ignore[assignment]
    trainer = trainer_of(folder, name)
    seen = Seen()
    trainer.add_callback(seen.of(trainer))
    trainer.add_callback(strikes)
    for kind in kinds:
        strikes.watch(kind)
    trainer.train(resume_from_checkpoint="auto")
    torch.save(doubles.weights(trainer), folder / "weights.pt")
    (folder / "records.json").write_text(json.dumps(records_of(trainer), default=str))
    kinds = [type(one) for one in seen.extensions if one.name == MEMBERS[name].name]
    (folder / "seen.json").write_text(json.dumps([[kind.__module__, kind.__qualname__] for kind in kinds]))
    (folder / "calls.json").write_text(json.dumps(strikes.calls))


def in_a_fork(folder: Path, name: str, kinds: list[type], strikes: Strikes) -> int:
    """Returns how a run ended; one that stops goes on after a moment, one that takes too long is killed."""
    folder.mkdir(exist_ok=True)
    process = os.fork()
    if process == 0:
        with (folder / "said").open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        try:
            live(folder, name, kinds, strikes)
        except SystemExit as error:
            os._exit(int(error.code or 0))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
        if ended and os.WIFSTOPPED(status):
            time.sleep(0.3)
            os.kill(process, signal.SIGCONT)
        elif ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -999


def classes_in(folder: Path) -> list[type]:
    import importlib

    return [
        getattr(importlib.import_module(module), name)
        for module, name in json.loads((folder / "seen.json").read_text())
        if "<locals>" not in name
    ]


def end_of(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    return torch.load(folder / "weights.pt"), json.loads((folder / "records.json").read_text())


def problem_after(folder: Path, name: str, kinds: list[type], whole: tuple[Any, Any], status: int) -> str:
    """Resumes a run that a fault has struck; returns what is wrong with its end."""
    said = (folder / "said").read_text()
    if status == -999:
        return f"it did not end: {said[-1500:]}"
    again = in_a_fork(folder, name, kinds, Strikes(name))
    if again != 0:
        return f"its resume ended with {again}: {(folder / 'said').read_text()[-2500:]}"
    weights, records = end_of(folder)
    if not doubles.same(weights, whole[0]):
        return "other weights"
    return " ".join(differing(records, whole[1], "record "))


def find_problems(folder: Path, name: str) -> dict[str, str]:
    """Returns what is wrong after each fault, by fault and phase; and "" for each that is survived."""
    kinds: list[type] = []
    quiet = folder / "quiet"
    status = in_a_fork(quiet, name, kinds, Strikes(name))
    assert status == 0, (quiet / "said").read_text()[-3000:]
    whole = end_of(quiet)
    kinds = classes_in(quiet)
    assert in_a_fork(folder / "counted", name, kinds, Strikes(name)) == 0
    calls: Calls = json.loads((folder / "counted" / "calls.json").read_text())
    found = {}
    for fault, strike in STRIKES.items():
        phases = {"step": 3, **({event: -(-count // 2) for event, count in calls.items()})}
        for phase, at in phases.items() if fault in IN_EACH_PHASE else [("step", 3)]:
            place = folder / f"{fault}-{phase}"
            status = in_a_fork(place, name, kinds, Strikes(name, phase, at, strike))
            found[f"{fault} in {phase}"] = problem_after(place, name, kinds, whole, status)
            shutil.rmtree(place, ignore_errors=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(find_problems(Path(sys.argv[1]), sys.argv[2])))
