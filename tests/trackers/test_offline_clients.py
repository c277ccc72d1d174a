"""Trackers whose real clients write to files where there is no service: what the files hold after the process ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from trainwright.journal.record import read
from trainwright.trackers.base import ENDS, rewrite_logs

from .._support.subprocesses import environment
from .services import Values

pytestmark = pytest.mark.process

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


READERS: dict[str, Callable[[Path], Values]] = {"comet_ml": comet_values}


def train(name: str, folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output."""
    command = [sys.executable, str(SCRIPT), name, str(folder), *words]
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment(), cwd=folder, start_new_session=True
        )
    try:
        code = process.wait(200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return code, (folder / "out.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", READERS)
def test_the_values_are_those_of_the_journal_also_after_failure_and_resume(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    code, out = train(name, tmp_path, "cut")
    assert code == 1
    assert "RuntimeError: cut" in out
    code, out = train(name, tmp_path)
    assert code == 0, out[-3000:]
    expected = {
        (shown, step): value
        for step, values in read(tmp_path / "run").logs()
        for shown, value in rewrite_logs({k: v for k, v in values.items() if k not in ENDS}).items()
        if not any(word in shown for word in CLOCK) and not shown.endswith("epoch")
    }
    assert {step for _, step in expected} == {1, 2, 3, 4, 5, 6}
    seen = READERS[name](tmp_path)
    assert {key: seen.get(key) for key in expected} == pytest.approx(expected, rel=1e-5)
