"""Several processes train each trial: one keeps the study, the others follow, and all know the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .._support.two_processes import run
from .small import MODEL

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("together.py")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", ["module", pytest.param("minilm", marks=pytest.mark.slow)])
def test_two_processes_search_together(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL, model)
    done = run(SCRIPT, str(tmp_path), folder=tmp_path)
    first, second = done.told
    assert first == second
    assert first["loaded"] == first["best"][1]
    assert first["same"] is True  # the same weights as a run of two processes by hand
    assert "learning_rat is not an argument" in first["bad"]
    assert first["rate"] == 1e-2
    trials = json.loads((tmp_path / "search" / "search.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["finished", "pruned", "finished"]
    assert [len(trial["curve"]) for trial in trials] == [3, 2, 3]
