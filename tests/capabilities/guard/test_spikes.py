"""Spikes in loss or gradient norm: skipped, made and said, or the end; a resume remembers what was normal."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.capabilities.guard.step_guard import is_guard_state
from trainwright.capability_table import FILES
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.store import CheckpointStore
from trainwright.checkpoint.training_state import save_json
from trainwright.errors import CheckpointError, SpikeError

from ..._support import forked
from ...contract import doubles
from . import killed
from .poisoned import BATCH, Hears, LeavesOut, trained, trainer

SPIKES = {"loss": {"constant": 1e6}, "grad_norm": {"labels": 1e6}}
SETTINGS = {"max_steps": 12, "logging_steps": 12, "spike_warmup": 5, "spike_window": 7, "spike_threshold": 100.0}


def spike_at(*steps: int, kind: str = "grad_norm") -> dict[int, dict[str, Any]]:
    return {(step - 1) * BATCH: SPIKES[kind] for step in steps}


@pytest.mark.parametrize("kind", SPIKES)
def test_a_spike_is_skipped(kind: str, tmp_path: Path) -> None:
    hears = Hears()
    one = trained(
        tmp_path / "one", poison=spike_at(8, kind=kind), settings={**SETTINGS, "on_spike": "skip"}, callbacks=[hears]
    )
    hand = trained(tmp_path / "hand", settings=SETTINGS, callbacks=[LeavesOut(8)])
    assert doubles.same(doubles.weights(one), doubles.weights(hand))
    (incident,) = hears.incidents
    assert (incident.kind, incident.step, incident.action) == ("spike", 8, "skip")
    assert incident.values[kind] > 1e5
    assert kind in incident.text
    assert "beyond 100 robust deviations" in incident.text


def test_nothing_is_a_spike_during_the_warmup(tmp_path: Path) -> None:
    hears = Hears()
    trained(tmp_path, poison=spike_at(5), settings={**SETTINGS, "on_spike": "skip"}, callbacks=[hears])
    assert hears.incidents == []


@pytest.mark.parametrize(("threshold", "expected"), [(100.0, [8]), (1e15, [])])
def test_a_spike_that_is_only_warned_of_is_trained_on(threshold: float, expected: list[int], tmp_path: Path) -> None:
    hears = Hears()
    settings = {**SETTINGS, "on_spike": "warn", "spike_threshold": threshold}
    warned = trained(tmp_path / "warned", poison=spike_at(8), settings=settings, callbacks=[hears])
    off = trained(tmp_path / "off", poison=spike_at(8), settings=SETTINGS)
    assert doubles.same(doubles.weights(warned), doubles.weights(off))
    assert [incident.step for incident in hears.incidents if incident.step == 8] == expected


def test_stop_raises_before_the_update(tmp_path: Path) -> None:
    with pytest.raises(SpikeError, match=r"Step 8: .*training stops before the update"):
        trained(tmp_path, poison=spike_at(8), settings={**SETTINGS, "on_spike": "stop"})


def test_a_resume_right_before_a_spike_decides_as_the_whole_run(tmp_path: Path) -> None:
    poison = spike_at(7, 8) | {16: {"x": SPIKES["grad_norm"]["labels"] * doubles.samples(1)[0]["x"] * math.nan}}
    settings = {**SETTINGS, "on_spike": "skip", "save_strategy": "steps", "save_steps": 1}
    heard = []
    whole = trained(tmp_path / "whole", poison=poison, settings=settings, callbacks=[hears := Hears()])
    heard.append([(incident.step, incident.kind) for incident in hears.incidents])
    assert heard == [[(7, "spike"), (8, "spike"), (9, "nonfinite")]]
    for step in (6, 7, 8):
        parts = {"poison": poison, "settings": settings, "callbacks": [hears := Hears()]}
        resumed = trainer(tmp_path / f"resumed-{step}", **parts)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert [(i.step, i.kind) for i in hears.incidents] == [one for one in heard[0] if one[0] > step]
        assert doubles.same(doubles.weights(resumed), doubles.weights(whole))
    saved = json.loads((tmp_path / "whole" / "checkpoint-8" / "guard_state.json").read_text())
    assert saved["skipped_in_a_row"] == 2
    assert [len(values) for values in saved["accepted"].values()] == [6, 6]


@pytest.mark.process
def test_killed_right_before_bad_steps_a_run_decides_as_the_whole_one(tmp_path: Path) -> None:
    weights, heard = killed.train(tmp_path / "whole")
    assert heard == [(killed.SPIKE_STEP, "spike"), (killed.BAD_STEP, "nonfinite")]
    folder = tmp_path / "killed"
    for step in (killed.SPIKE_STEP, killed.BAD_STEP):
        process = forked.start([killed.__file__, str(folder), str(step)], merge_output=True)
        text, _ = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, text
        assert CheckpointStore(folder).steps()[-1] == step - 1
    again, heard_again = killed.train(folder)
    assert heard_again == heard[1:]
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_skipped_steps_in_a_row_are_counted_across_a_resume(tmp_path: Path) -> None:
    poison = spike_at(7, 8, 9)
    settings = {**SETTINGS, "on_spike": "skip", "save_strategy": "steps", "save_steps": 1}
    trained(tmp_path / "whole", poison=poison, settings=settings)
    resumed = trainer(tmp_path / "resumed", poison=poison, settings={**settings, "max_skipped_steps": 3})
    with pytest.raises(SpikeError, match="3 steps in a row"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))


def test_a_run_without_incidents_and_spikes_writes_no_file(tmp_path: Path) -> None:
    trained(tmp_path, settings={"max_steps": 1, "save_strategy": "steps", "save_steps": 1})
    assert not (tmp_path / "checkpoint-1" / "guard_state.json").exists()


@pytest.mark.parametrize(
    "state",
    [
        "[]",
        "3",
        "{",
        '{"accepted": 3}',
        '{"accepted": {"loss": [NaN]}}',
        '{"skipped_in_a_row": -1}',
        '{"accepted": {"loss": ["x"]}}',
        '{"skipped_in_a_row": "many"}',
    ],
)
def test_a_file_that_no_run_writes_is_refused(state: str, tmp_path: Path) -> None:
    (tmp_path / "guard_state.json").write_text(state)
    with pytest.raises(CheckpointError, match=r"guard_state\.json"):
        Checkpoint(tmp_path).entry("guard").state(is_guard_state)


def test_the_file_is_read_back(tmp_path: Path) -> None:
    state = {"skipped_in_a_row": 2, "accepted": {"loss": [1.0, 2.5]}}
    save_json(state, tmp_path / FILES["guard"])
    assert Checkpoint(tmp_path).entry("guard").state(is_guard_state) == state
