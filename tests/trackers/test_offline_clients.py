"""Trackers whose real clients write to files where there is no service: what the files hold after the process ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from trainwright.journal.record import read
from trainwright.trackers.base import ENDS, rewrite_logs

from .services import Values

SCRIPT = Path(__file__).with_name("offline.py")
ROOT = Path(__file__).resolve().parents[2]
CLOCK = ("runtime", "per_second")


def comet_values(folder: Path) -> Values:
    found: Values = {}
    for path in sorted((folder / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime):
        with zipfile.ZipFile(path) as archive:
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        for one in (message["payload"] for message in messages if message["type"] == "metric_msg"):
            metric = one["metric"]
            found[metric["metricName"], metric["step"]] = float(metric["metricValue"])
    return found


def clearml_values(folder: Path) -> Values:
    found: Values = {}
    for path in sorted((folder / "clearml").rglob("metrics.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text().splitlines():
            for one in json.loads(line):
                if one["type"] == "training_stats_scalar":
                    found[f"{one['metric']}/{one['variant']}", one["iter"]] = one["value"]
    return found


READERS: dict[str, Callable[[Path], Values]] = {"comet_ml": comet_values, "clearml": clearml_values}


def train(name: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(SCRIPT), name, str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=200)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", READERS)
def test_the_values_are_those_of_the_journal_also_after_a_failure_and_a_resume(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    cut = train(name, tmp_path, "cut")
    assert "RuntimeError: cut" in cut.stderr
    done = train(name, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {
        (shown, step): value
        for step, values in read(tmp_path / "run").logs()
        for shown, value in rewrite_logs({k: v for k, v in values.items() if k not in ENDS}).items()
        if not any(word in shown for word in CLOCK) and not shown.endswith("epoch")
    }
    assert {step for _, step in expected} == {1, 2, 3, 4, 5, 6}
    seen = READERS[name](tmp_path)
    assert {key: seen.get(key) for key in expected} == pytest.approx(expected, rel=1e-5)
