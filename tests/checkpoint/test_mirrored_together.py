"""Copies of the checkpoints of two processes, whole and in shards, resume in an empty directory to the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from .._support.two_processes import run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_two_processes_resume_from_copies(tmp_path: Path) -> None:
    done = run(Path(__file__).with_name("mirrored_together.py"), str(tmp_path), folder=tmp_path)
    assert len(done.told) == 2
    for told in done.told:
        for found in (told["ddp"], told["sharded"]):
            assert (found["step"], found["same"], found["copies"][0]) == (6, True, 6)
            assert not any(found["problems"])
