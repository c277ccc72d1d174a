"""A search that is killed or signalled goes on: finished trials stay, the one under way is taken up again."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from .._support import forked
from .._support.small import differing
from .._support.subprocesses import environment
from .small import MODEL, saved

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("cut_off.py")
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, *words: str) -> forked.Process:
    folder.mkdir(exist_ok=True)
    return forked.start([str(SCRIPT), str(folder), *words], env=environment(), cwd=folder, merge_output=True)


def finished(process: forked.Process) -> str:
    try:
        out = process.communicate(timeout=200)[0]
    finally:
        process.kill()
    assert process.returncode == 0, out[-4000:]
    return out


def cut_off(folder: Path, number: signal.Signals) -> int:
    """Signals a search that says HERE; returns its exit code."""
    process = start(folder)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("HERE"):
                process.send_signal(number)
                break
        return process.wait(100)
    finally:
        process.kill()
        process.stdout.close()


def results(folder: Path) -> Any:
    return json.loads((folder / "best.json").read_text())


@pytest.fixture(scope="module", params=["module", "minilm"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A search that ran to its end; those of the test search with the same model."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODEL, request.param)
        finished(start(folder, "whole"))
        yield folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "code", "step"), [(signal.SIGTERM, 143, 4), (signal.SIGKILL, -9, 2)])
def test_a_search_that_was_cut_off_goes_on(
    number: signal.Signals, code: int, step: int, whole: Path, tmp_path: Path
) -> None:
    assert cut_off(tmp_path, number) == code
    checkpoints = sorted(path.name for path in (tmp_path / "run-2").glob("checkpoint-*"))
    assert checkpoints[-1] == f"checkpoint-{step}"
    out = finished(start(tmp_path))
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path}/study.db")
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    again = study.trials[3]
    assert again.params == study.trials[2].params
    assert again.user_attrs["goes_on_from"]["number"] == 2
    assert results(tmp_path) == results(whole)
    assert (tmp_path / "run-3" / "checkpoint-2").exists() is False, out  # it went on, and did not begin anew
    original = next(
        t
        for t in optuna.load_study(study_name="search", storage=f"sqlite:///{whole}/study.db").trials
        if t.params == again.params
    )
    one = saved(tmp_path / "run-3" / "checkpoint-6")
    other = saved(whole / f"run-{original.number}" / "checkpoint-6")
    assert differing(one, other) == {}
    trials = json.loads((tmp_path / "search.json").read_text())["trials"]
    assert [trial["state"] for trial in trials if trial["id"] != "2"] == 4 * ["finished"]
