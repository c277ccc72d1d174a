"""A run with everything switched on, and random faults: it ends in the weights and the records of a quiet one.

A fault is a kill, a stop for a moment or a signal, of the run, of one of its processes or of all of them. After the end
nothing is left: no process, no temporary file, no half-written directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

from .test_kill_anywhere import NEVER_ENDING, Nursery, assert_same_end, command, words

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

SAVE_STEPS = 4
ENDS = {0, 128 + signal.SIGTERM, 128 + signal.SIGINT, *(-number for number in (9, signal.SIGTERM, signal.SIGINT))}
LOST = ("DataLoader worker", "the process that evaluates could not begin")  # a kill of these is an error of the run
LEAVES_S = 30  # for processes that follow their run


class Whole(NamedTuple):
    """What the quiet run ended with, and its time."""

    weights: dict[str, torch.Tensor]
    records: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("all")
    yield nursery
    nursery.close()


def run(folder: Path) -> tuple[object, ...]:
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    return command(folder, SAVE_STEPS, "", 0, "everything")


def end_of(folder: Path, seconds: float = 0.0) -> Whole:
    path = folder / "weights.safetensors"
    return Whole(safetensors.torch.load_file(path), json.loads(Path(f"{path}.records").read_text()), seconds)


@pytest.fixture(scope="module")
def whole(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    begin = time.monotonic()
    nursery.start(*run(folder))
    assert nursery.wait() == 0, words(folder)
    return end_of(folder, time.monotonic() - begin)


# -- faults ------------------------------------------------------------------------------------------------------------


def processes_in(folder: Path) -> list[int]:
    """The processes whose working directory this is: those of the run, wherever their parents are."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "cwd").readlink() == folder and "Z" not in (place / "stat").read_text().split()[2]:
                found.append(int(place.name))
    return found


def strike(process: int, folder: Path, draw: random.Random) -> str:
    """Does something to a run, or to some of its processes; returns what."""
    others = [one for one in processes_in(folder) if one != process]
    victims = {"run": [process], "one": [draw.choice(others)] if others else [], "all": [process, *others]}
    who = draw.choice([*victims])
    what = draw.choice(["kill", "stop", "SIGTERM", "SIGINT"] if who != "one" else ["kill", "stop"])
    for one in victims[who]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(what) or getattr(signal, what))
    if what == "stop":
        time.sleep(draw.uniform(0.1, 2.0))
        for one in victims[who]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)
    return f"{what} {who}"


def struck_until_it_ends(nursery: Nursery, folder: Path, draw: random.Random, whole: Whole) -> list[str]:
    """Starts a run, does something to it, and starts it again until it gets to its end; returns what was done."""
    done: list[str] = []
    for start in range(NEVER_ENDING):
        process = nursery.start(*run(folder))
        if start < 3:
            time.sleep(draw.uniform(0.0, whole.seconds))
            done.append(strike(process, folder, draw))
        status = nursery.wait()
        if status == 0:
            return done
        assert status in ENDS or any(one in words(folder) for one in LOST), f"{done} {status} {words(folder)}"
    pytest.fail(f"never at the end: {done}")


# -- faults at a place -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["after training_step", "before weights"])
def test_a_crash_of_a_thread_ends_the_run_and_loses_nothing(place: str, nursery: Nursery, tmp_path: Path) -> None:
    ends = []
    for folder in (tmp_path / "whole", tmp_path / "crashed"):
        folder.mkdir()
        if folder.name == "crashed":
            nursery.start(*command(folder, SAVE_STEPS, f"crash at {place}", 3, "behind"))
            assert nursery.wait() == -signal.SIGSEGV
        nursery.start(*command(folder, SAVE_STEPS, "", 0, "behind"))
        assert nursery.wait() == 0, words(folder)
        ends.append(safetensors.torch.load_file(folder / "weights.safetensors"))
    assert_same_end(tmp_path / "crashed", ends[0])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["after training_step", "before weights"])
def test_a_thread_that_holds_the_interpreter_changes_nothing(
    place: str, nursery: Nursery, whole: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "held"
    run(folder)  # makes its directories
    nursery.start(*command(folder, SAVE_STEPS, f"hold at {place}", 3, "everything"))
    assert nursery.wait() == 0, words(folder)
    assert_same_end(folder, whole.weights)
    assert differing(end_of(folder).records, whole.records) == []
    assert_nothing_is_left(folder)


# -- what is left ------------------------------------------------------------------------------------------------------


def assert_nothing_is_left(folder: Path) -> None:
    deadline = time.monotonic() + LEAVES_S
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [Path(f"/proc/{one}/cmdline").read_text() for one in left] == []
    # Those of multiprocessing are removed by a process that ends by itself.
    assert [path for path in (folder / "tmp").iterdir() if not path.match("pymp-*")] == []
    half = [path for path in (folder / "run").rglob(".*") if path.name.endswith(".partial") and path.stat().st_size]
    assert half == []
    assert {path.name for path in (folder / "run/_evaluations").rglob("*.*")} <= {"request.json", "result.json"}
    assert [*(folder / "run/_control").iterdir()] == []


def differing(one: Any, other: Any, place: str = "") -> list[str]:
    """The places at which two values of JSON differ."""
    if type(one) is type(other) is dict and one.keys() == other.keys():
        return [found for key in one for found in differing(one[key], other[key], f"{place}.{key}")]
    if type(one) is type(other) is list and len(one) == len(other):
        return [
            found
            for number, (mine, its) in enumerate(zip(one, other, strict=True))
            for found in differing(mine, its, f"{place}[{number}]")
        ]
    return [] if one == other else [f"{place}: {str(one)[:300]} != {str(other)[:300]}"]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_ten_random_faults(first: int, nursery: Nursery, whole: Whole, tmp_path: Path) -> None:
    for seed in range(first, first + 10):
        folder = tmp_path / str(seed)
        done = struck_until_it_ends(nursery, folder, random.Random(seed), whole)
        print(seed, done)
        assert_same_end(folder, whole.weights)
        assert differing(end_of(folder).records, whole.records) == [], f"seed {seed}: {done}"
        assert_nothing_is_left(folder)
        shutil.rmtree(folder)
