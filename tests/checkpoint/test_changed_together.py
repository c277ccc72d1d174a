"""Checkpoints of two processes verify with what a callback or an override of any one of them made of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from .._support.two_processes import run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_changes_by_any_process_are_listed_and_resumed(tmp_path: Path) -> None:
    done = run(Path(__file__).with_name("changed_together.py"), str(tmp_path), folder=tmp_path)
    expected = {
        "steps": [2, 4, 6],
        "problems": [None] * 3,
        "lists": [True] * 3,
        "resume takes the change": True,
    }
    for told in done.told:
        assert len(told) == 15
        assert {name: outcome for name, outcome in told.items() if outcome != expected} == {}
