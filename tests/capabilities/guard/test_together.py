"""Guards of two processes of which one sees the bad steps: both count, diagnose and end alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainwright.checkpoint.checkpoint import Checkpoint

from ..._support.two_processes import Done, finish_forks, start_forks
from ...distributed.layouts import MODEL, write_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def together(folder: Path, kind: str) -> Done:
    script = Path(__file__).with_name("together.py")
    return finish_forks(start_forks(script, str(folder), kind, folder=folder), folder, grace_s=20)


def errors_in(done: Done) -> dict[int, str]:
    """The error with which each process ended."""
    assert done.code != 0
    return {int(rank): said for rank, said in re.findall(r"\[rank(\d)\]: \S*NonFiniteError: (.*)", done.out)}


def test_skipped_steps_are_counted_on_by_both_after_a_resume(tmp_path: Path) -> None:
    done = together(tmp_path, "counts")
    assert done.code == 0, done.out
    expected = {"1": 1, "2": 1, "3": 1, "4": 1, "5": 2, "6": 2, "7": 2, "8": 2}
    assert [told["counts"] for told in done.told] == [expected, expected]
    assert Checkpoint(tmp_path / "counts" / "checkpoint-3").entry("guard").state()["skipped_steps"] == 1
    assert done.out.count("2 of 8 steps had no update") == 1, "the main process says it"


@pytest.mark.parametrize("kind", ["share", "resumed"])
def test_limit_by_share_ends_both_at_the_same_step_also_after_resume(kind: str, tmp_path: Path) -> None:
    done = together(tmp_path, kind)
    errors = errors_in(done)
    assert errors.keys() == {0, 1}, done.out
    for said in errors.values():
        assert said.startswith("51 of the last 100 steps were skipped (max_skipped_share=0.5). Step 56: ")


def test_parts_of_a_model_are_diagnosed_together(tmp_path: Path) -> None:
    write_model(tmp_path / MODEL)
    done = together(tmp_path, "parts")
    errors = errors_in(done)
    assert errors.keys() == {0, 1}, done.out
    for said in errors.values():
        assert said.startswith("Step 4: ")
        assert "Not finite, regardless of the samples: the weights (" in said
        assert "the optimizer state (exp_avg of " in said
