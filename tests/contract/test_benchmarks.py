"""The benchmarks run, in their small form, and print one JSON line with figures of ours."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "gpu": "table",
    "resume": "--small",
    "evaluation": "--small",
    "sizes": "--quick",
    "long_context_memory": "--small",
    "checkpoint": "--small",
    "packed_rows": "--small",
    "sharded_saves": "--small",
    "remote": "--small",
    "upload_stalls": "--small",
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALL)
def test_it_runs_in_its_small_form(name: str) -> None:
    command = [sys.executable, "-W", "ignore", str(FOLDER / f"{name}.py"), SMALL[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    assert len(json.loads(line)) > 1
    assert "trainwright" in line
    assert [number for number in numbers(json.loads(line)) if number > 0]


def test_the_page_of_results_is_what_would_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So nothing is lost when one benchmark is run again: tables are kept, and notes are the files in `notes/`."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    full = importlib.import_module("full")
    monkeypatch.setattr(full, "machine", lambda: "MACHINE")
    is_now = re.sub(r"^\d+ CPU cores .*$", "MACHINE.", (FOLDER / "RESULTS.md").read_text(), count=1, flags=re.M)
    assert full.render(tmp_path) == is_now


def numbers(figures: Any) -> list[float]:
    """The measured ones of a JSON value, all of which are finite."""
    if isinstance(figures, dict):
        return [number for one in figures.values() for number in numbers(one)]
    if isinstance(figures, float):
        assert math.isfinite(figures)
        return [figures]
    return []
