"""Two processes end together: after an error in one, a signal to one, or a standstill of one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from trainwright import get_last_checkpoint

from .._support.forked import Process
from .._support.two_processes import Done, finish, finish_forks, launch, run, start_forks

SCRIPT = Path(__file__).with_name("ending.py")
slow = pytest.mark.slow
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]  # a few starts each


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    run(SCRIPT, str(folder), "none", folder=folder)
    return (folder / "final/model.safetensors").read_bytes()


def ended(case: str, folder: Path, *, forks: bool = False) -> Done:
    """Under torchrun, whose store outlives process 0; of forks the others have half a minute to end by themselves."""
    if forks:
        return finish_forks(start_forks(SCRIPT, str(folder), case, folder=folder), folder, grace_s=30)
    return finish(launch(SCRIPT, str(folder), case, folder=folder), folder)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("data", "Process 1 failed:.*ValueError: sample 17 is broken"),
        pytest.param("step", "Process 0 failed:.*ZeroDivisionError: a step went wrong", marks=slow),
        pytest.param("evaluation", "Process 1 failed:.*KeyError: 'no such metric'", marks=slow),
        pytest.param("save", "Process 0 failed:.*OSError: no space left on device", marks=slow),
        # ddp_timeout: time enough for a busy machine to start both; gloo has two sentences for what ran out
        pytest.param("late", "Process 0 failed:.*RuntimeError:.* (waiting 30000ms|timeout caused)", marks=slow),
    ],
)
def test_an_error_in_one_process_ends_all_and_is_shown(case: str, error: str, tmp_path: Path) -> None:
    done = ended(case, tmp_path, forks=case == "data")
    assert done.code != 0
    assert re.search(error, done.out, flags=re.DOTALL), done.out
    assert get_last_checkpoint(tmp_path) in (None, str(tmp_path / "checkpoint-8"))
    assert "ENDED" not in done.out


@slow
def test_a_standstill_of_one_process_shows_the_stacks_of_both(tmp_path: Path) -> None:
    done = ended("standstill", tmp_path)
    assert done.code != 0
    assert "has finished no step and no batch of an evaluation for" in done.out
    assert "Stacks of process 0:" in done.out
    assert "Stacks of process 1:" in done.out
    assert re.search(r"ending\.py.{1,20}line \d+ in training_step", done.out), done.out
    assert re.search(r"    process 1: training_step \(ending\.py, line \d+\) on ", done.out), done.out
    assert re.search(r"    process 0: (?!training_step)\w+ \(.+\.py, line \d+\) on ", done.out), done.out


def signalled(process: Process) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("HERE"):
            os.kill(int(line.split()[1]), signal.SIGTERM)
            return
    raise AssertionError("the script never said HERE")


@pytest.mark.parametrize(
    ("case", "step"), [("signal in a step", 6), pytest.param("signal in an evaluation", 6, marks=slow)]
)
def test_a_signal_to_one_process_saves_once_and_ends_both(
    case: str, step: int, uninterrupted: bytes, tmp_path: Path
) -> None:
    cut = tmp_path
    ranks = start_forks(SCRIPT, str(cut), case, folder=cut)
    signalled(ranks[1])
    done = finish_forks(ranks, cut, grace_s=30)
    assert done.code != 0
    found = re.findall(r"Interrupted by SIGTERM after step (\d+), which is saved", done.out)
    assert len(found) == 2, done.out
    assert found[0] == found[1]
    assert int(found[0]) in (step, step + 1)
    assert get_last_checkpoint(cut) == str(cut / f"checkpoint-{found[0]}")
    run(SCRIPT, str(cut), "none", folder=cut)
    assert (cut / "final/model.safetensors").read_bytes() == uninterrupted
