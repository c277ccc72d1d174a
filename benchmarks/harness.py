"""What every benchmark measures with: subjects that take turns in one process, a counter of calls, ratios by turn.

Each subject is an ordinary loop in a thread of its own, and all but one of them wait: A runs a few steps, then B, then
C, then A again. What else the machine does in these moments hits neighbours alike, so a ratio of neighbours stays.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Watch(Protocol):
    """What a subject tells how far it is."""

    def step_done(self, step: int) -> None: ...


Subject = Callable[[Watch], None]


@dataclass(frozen=True)
class Turns:
    """How a loop is cut: the steps before the first turn are for setting up and warming up.

    The first step of a turn is not timed: it finds the caches as another subject left them.
    """

    warm_up: int
    num: int
    steps: int

    @property
    def total_steps(self) -> int:
        return self.warm_up + self.num * (self.steps + 1)

    def starts(self, step: int) -> bool:
        return step >= self.warm_up and (step - self.warm_up) % (self.steps + 1) == 1

    def ends(self, step: int) -> bool:
        return step >= self.warm_up and (step - self.warm_up) % (self.steps + 1) == 0


class Lap:
    """One subject's stopwatch and its place in the ring."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.next: Lap = self
        self.is_running = True
        self.error: BaseException | None = None
        self._my_turn = threading.Event()
        self._started = (0.0, 0.0)

    def step_done(self, step: int) -> None:
        if self.turns.starts(step):
            self._started = time.perf_counter(), time.thread_time()
        elif self.turns.ends(step):
            wall = time.perf_counter()
            cpu = time.thread_time()
            if step > self.turns.warm_up:
                self.wall_s.append(wall - self._started[0])
                self.cpu_s.append(cpu - self._started[1])
            else:
                _set_the_old_aside()
            self._pass_on()

    def run(self, subject: Subject) -> None:
        self.wait()
        try:
            subject(self)
        except BaseException as error:
            self.error = error
        self.is_running = False
        self._wake_next()

    def start(self) -> None:
        self._my_turn.set()

    def wait(self) -> None:
        self._my_turn.wait()
        self._my_turn.clear()

    def _pass_on(self) -> None:
        self._wake_next()
        self.wait()

    def _wake_next(self) -> None:
        other = self.next
        while other is not self and not other.is_running:
            other = other.next
        if other.is_running:
            other.start()


def _set_the_old_aside() -> None:
    """The collector stays on, as a user has it; what set-up left behind is collected once and not looked at again."""
    gc.collect()
    gc.freeze()


def take_turns(subjects: Mapping[str, Subject], turns: Turns) -> dict[str, Lap]:
    """Runs all subjects to their end, one at a time."""
    laps = {name: Lap(turns) for name in subjects}
    ring = list(laps.values())
    for lap, following in zip(ring, [*ring[1:], ring[0]], strict=True):
        lap.next = following
    threads = [threading.Thread(target=laps[name].run, args=(subject,)) for name, subject in subjects.items()]
    with silence():
        for thread in threads:
            thread.start()
        ring[0].start()
        for thread in threads:
            thread.join()
    gc.unfreeze()
    for lap in ring:
        if lap.error is not None:
            raise lap.error
        assert len(lap.wall_s) == turns.num
    return laps


class CallCounter:
    """Python functions called in the steps of one turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._calls = 0
        self._num_steps = 0

    @property
    def per_step(self) -> float:
        return self._calls / self._num_steps

    def step_done(self, step: int) -> None:
        if self._turns.starts(step) and not self._num_steps:
            sys.setprofile(self._count)
        elif self._turns.ends(step) and step > self._turns.warm_up:
            sys.setprofile(None)
            self._num_steps = self._num_steps or self._turns.steps

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self._calls += event == "call"


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What a subject prints is written, but not to a terminal: a terminal's speed is not the subject's."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def ratios(times: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """A subject's time over the base's, turn by turn."""
    found = [one / other for one, other in zip(times, base, strict=True)]
    return {"ratio": round(statistics.median(found), 3), "min": round(min(found), 3), "max": round(max(found), 3)}


def measure(make: Callable[[int], Mapping[str, Subject]], *, base: str, turns: Turns) -> dict[str, dict[str, float]]:
    """Times and counts of all subjects. `make(num_steps)` gives them, new each time."""
    laps = take_turns(make(turns.total_steps), turns)
    brief = Turns(warm_up=turns.warm_up, num=1, steps=10)
    results: dict[str, dict[str, float]] = {}
    for name, subject in make(brief.total_steps).items():
        counter = CallCounter(brief)
        with silence():
            subject(counter)
        lap = laps[name]
        results[name] = {
            **ratios(lap.wall_s, laps[base].wall_s),
            "ratio_cpu": ratios(lap.cpu_s, laps[base].cpu_s)["ratio"],
            "us_per_step": round(statistics.median(lap.wall_s) / turns.steps * 1e6, 1),
            "python_calls_per_step": round(counter.per_step, 1),
        }
    return results


def peak_bytes() -> int:
    """Most memory that this process has held. Where the system tells it for the program alone, the peak of whoever
    started it is not in it, which `ru_maxrss` has.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def versions(*packages: str) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def run_apart(script: str, *words: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a script prints as its last line, a JSON object, in a process of its own; RuntimeError if it fails."""
    command = [sys.executable, "-W", "ignore", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_json(values: Mapping[str, Any]) -> None:
    print(json.dumps(values), flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
