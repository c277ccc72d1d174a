"""Measurements on a lent machine: one that fails, hangs or comes too late loses no other, and leaves no process."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.process
FOLDER = Path(__file__).parents[2] / "benchmarks"
# Waits as the process of a cell does, then does what the cell's name says.
CHILD = """
import json, os, subprocess, sys, time
name, result = sys.argv[1:]
if sys.stdin.readline() != "begin\\n":
    sys.exit(0)
if name == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["PIDS"], "a").write(f"{child.pid} ")
    time.sleep(600)
if name == "ends":
    os._exit(7)
open(result, "w").write(json.dumps({"value": len(name)}))
"""


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("on_gpu.cells")


def lines_of(folder: Path) -> dict[str, dict[str, Any]]:
    lines = map(json.loads, (folder / "gpu.jsonl").read_text().splitlines())
    return {line["cell"]: line for line in lines}


def test_a_cell_that_hangs_or_ends_loses_no_other(
    cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    given = [cells.Cell(name, limit) for name, limit in (("one", 60), ("hangs", 3), ("ends", 60), ("four", 60))]
    assert cells.run_cells(given, [sys.executable, "-c", CHILD], tmp_path, minutes=5) == 2
    found = lines_of(tmp_path)
    assert found["one"]["value"] == 3
    assert found["hangs"]["failed"] == "took longer than 3 s"
    assert found["ends"]["failed"] == "the process ended with 7"
    assert found["four"]["value"] == 4
    assert [json.loads(line)["cell"] for line in capfd.readouterr().out.splitlines()] == [*found]
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        deadline = time.monotonic() + 30
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the child of a cell outlived it"
            time.sleep(0.05)


def test_what_comes_too_late_is_a_line(cells: Any, tmp_path: Path) -> None:
    given = [cells.Cell(name, 60) for name in ("one", "two")]
    assert cells.run_cells(given, [sys.executable, "-c", CHILD], tmp_path, minutes=0) == 0
    assert {line["failed"] for line in lines_of(tmp_path).values()} == {"no time left"}


def test_every_cell_has_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """`work_of` finds the job and settings of each name; each published figure belongs to a job."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    gpu: Any = importlib.import_module("gpu")
    names = [cell.name for command in ("bench", "more") for cell in gpu.cells_of(command, [])]
    assert len(names) == len({*names}) + 1  # the machine is in both
    for name in {*names} - {"machine"}:
        if not name.startswith("stalls"):
            assert gpu.work_of(name, is_tiny=True)[0].job.num_steps > 0
    assert {*gpu.ANCHORS} <= {*gpu.JOBS}
