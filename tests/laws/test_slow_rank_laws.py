"""Slow processes are named: by their own work, not by the waiting of the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.extensions.slow_ranks.extension import BACKWARD_WORK, PHASES, SlowRanks, slow_ranks
from trainwright.journal.record import read
from trainwright.report.run_page import tables
from trainwright.state.progress import BACKWARD, DATA, FORWARD, Clock

from .._support.two_processes import run as run_ranks

SHARES = dict(zip(PHASES, (0.05, 0.01, 0.3, 0.6, 0.04, 0.0), strict=True))


def processes(number: int, step_s: float, noise: list[float]) -> np.ndarray:
    """Seconds of a step by process and phase, each up to a few percent off."""
    seconds = np.array([[step_s * SHARES[phase] for phase in PHASES] for _ in range(number)])
    return seconds * np.resize(np.array(noise), seconds.shape)


NOISE = st.lists(st.floats(0.97, 1.03), min_size=5, max_size=40)


@given(st.integers(2, 64), st.floats(0.1, 5.0), NOISE, st.booleans())
def test_processes_that_are_alike_have_no_slow_one(number: int, step_s: float, noise: list[float], waits: bool) -> None:
    assert slow_ranks(processes(number, step_s, noise), step_s, waits_in_forward=waits) == []


@given(st.integers(2, 64), st.floats(0.1, 5.0), NOISE, st.floats(1.4, 10.0), st.data())
def test_a_process_with_a_slower_device_is_named(
    number: int, step_s: float, noise: list[float], factor: float, draw: st.DataObject
) -> None:
    rank = draw.draw(st.integers(0, number - 1))
    seconds = processes(number, step_s, noise)
    forward = PHASES.index(FORWARD)
    backward = PHASES.index(BACKWARD)
    lost_s = (factor - 1) * (1 + BACKWARD_WORK) * seconds[rank, forward]
    seconds[rank, forward] *= factor
    seconds[:, backward] += lost_s  # they wait for it where gradients are averaged
    (found,) = slow_ranks(seconds, step_s + lost_s, waits_in_forward=False)
    assert (found.rank, found.phase) == (rank, FORWARD)
    assert found.ratio > 1.25
    assert slow_ranks(seconds, step_s + lost_s, waits_in_forward=True) == [], (
        "where it cannot be told, nobody is blamed"
    )


@given(st.integers(2, 64), st.floats(0.1, 5.0), NOISE, st.booleans(), st.data())
def test_a_process_that_reads_slowly_is_named_with_any_engine(
    number: int, step_s: float, noise: list[float], waits: bool, draw: st.DataObject
) -> None:
    rank = draw.draw(st.integers(0, number - 1))
    seconds = processes(number, step_s, noise)
    seconds[rank, PHASES.index(DATA)] += 0.5 * step_s
    (found,) = slow_ranks(seconds, 1.5 * step_s, waits_in_forward=waits)
    assert (found.rank, found.phase) == (rank, DATA)
    assert found.lost_s == pytest.approx(0.5 * step_s, rel=0.2)


def test_one_is_named_once_until_it_is_as_fast_as_the_others_again(caplog: pytest.LogCaptureFixture) -> None:
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    run: Any = SimpleNamespace(progress=SimpleNamespace(state=state, clock=Clock()))
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"),
        waits_in_forward=False,
        objects_of_replicas=lambda place: [place, (1, "far", "cpu:1")],
    )
    extension = SlowRanks(engine, "nowhere")
    extension.begin(run)
    even = processes(2, 10.0, [1.0])
    slow = even.copy()
    slow[1, PHASES.index(FORWARD)] *= 2
    told = []
    for seconds in (slow, slow, slow, slow, even, slow, slow, slow):  # the first is not compared
        state.global_step += 10
        extension.shared([[10.0, *row] for row in seconds.tolist()])
        told.append([record.getMessage()[:31] for record in caplog.records])
        caplog.clear()
    named = "Process 1 (far, cpu:1) is slow:"
    assert told == [[], [], [named], [], ["Process 1 is as fast as the oth"], [], [named], []]


@pytest.mark.process
@pytest.mark.timeout(200)
def test_a_slow_process_is_named_with_its_phase_while_it_is_slow(tmp_path: Path) -> None:
    script = Path(__file__).with_name("slow_of_two.py")
    done = run_ranks(script, str(tmp_path / "run"), folder=tmp_path, timeout_s=150)
    record = read(tmp_path / "run")
    of_second = [entry for entry in record.of("slow_rank") if entry["rank"] == 1]
    assert [entry["phase"] for entry in of_second] == [FORWARD, DATA]
    early, late = of_second
    assert (early["since"], early["step"]) == (10, 30), "after 20 steps, of which the first ten do not count"
    assert late["step"] in (60, 70), "its forward passes may be slow in between, where other work runs"
    assert done.out.count("Process 1 (") == 2, "the main process tells it"
    assert "It loses most in reading data." in done.out
    (table,) = record.of("processes")
    first, second = sorted(table["milliseconds_a_step"], key=lambda row: row["rank"])
    assert second["forward"] > first["forward"] + 10
    assert first["waiting"] > second["waiting"]
    assert any("Processes, milliseconds of a step" in part for part in tables(record))
