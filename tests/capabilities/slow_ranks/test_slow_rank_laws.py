"""Slow processes are named: by their own work, not by the waiting of the others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.capabilities.slow_ranks import extension
from trainwright.capabilities.slow_ranks.extension import BACKWARD_WORK, PHASES, WORDS, SlowRanks, slow_ranks
from trainwright.capabilities.slow_ranks.forward_waits import HostWaits
from trainwright.journal.record import read
from trainwright.report.run_page import tables, warnings
from trainwright.state import progress
from trainwright.state.progress import BACKWARD, DATA, EVALUATION, FORWARD, WAITING, Clock

from ..._support.engines import needs
from ..._support.two_processes import run as run_ranks

SHARES = dict(zip(PHASES, (0.05, 0.01, 0.3, 0.6, 0.04, 0.0), strict=True))


def processes(number: int, step_s: float, noise: list[float]) -> np.ndarray:
    """Seconds of a step by process and phase, each up to a few percent off."""
    seconds = np.array([[step_s * SHARES[phase] for phase in PHASES] for _ in range(number)])
    return seconds * np.resize(np.array(noise), seconds.shape)


NOISE = st.lists(st.floats(0.97, 1.03), min_size=5, max_size=40)


UNEVEN = st.lists(st.floats(0.92, 1.08), min_size=5, max_size=40)  # as on a busy host


@given(st.integers(2, 64), st.floats(0.1, 5.0), UNEVEN, st.booleans())
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


def test_one_is_named_once_until_it_is_as_fast_as_others_again(caplog: pytest.LogCaptureFixture) -> None:
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    counted = SimpleNamespace(state=state, clock=Clock())
    run: Any = SimpleNamespace(progress=counted, setup=SimpleNamespace(model=None))
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"),
        modules_that_wait=lambda model: [],
        gather_replica_objects=lambda place: [place, (1, "far", "cpu:1")],
    )
    slow_processes = SlowRanks(engine, "nowhere")
    slow_processes.begin(run)
    even = processes(2, 10.0, [1.0])
    slow = even.copy()
    slow[1, PHASES.index(FORWARD)] *= 2
    told = []
    for seconds in (slow, slow, slow, slow, even, slow, slow, slow):  # the first is not compared
        state.global_step += 10
        slow_processes.shared([[10.0, *row] for row in seconds.tolist()])
        told.append([record.getMessage()[:31] for record in caplog.records])
        caplog.clear()
    named = "Process 1 (far, cpu:1) is slow:"
    assert told == [[], [], [named], [], ["Process 1 is as fast as the oth"], [], [named], []]


def test_one_that_was_named_stays_slow_while_it_is_near_the_limit() -> None:
    seconds = processes(4, 10.0, [1.0])
    seconds[2, PHASES.index(FORWARD)] *= 1.15
    assert slow_ranks(seconds, 11.0, waits_in_forward=False) == []
    (found,) = slow_ranks(seconds, 11.0, waits_in_forward=False, named={2})
    assert found.rank == 2
    seconds[2, PHASES.index(FORWARD)] /= 1.1
    assert slow_ranks(seconds, 10.0, waits_in_forward=False, named={2}) == []


# -- forward passes that wait ------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer whose weights come from other processes: its hook waits for them, and its work takes its time after."""

    def __init__(self, pass_time: Callable[[float], None], waits_s: float, works_s: float) -> None:
        super().__init__()
        self._pass_time = pass_time
        self._works_s = works_s
        self.register_forward_pre_hook(lambda module, inputs: pass_time(waits_s))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._pass_time(self._works_s)
        return inputs


@pytest.fixture
def time_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that the test sets, instead of that of the machine and of the device; seconds."""
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def query(self) -> bool:
            return True

        def elapsed_time(self, ended: Event) -> float:
            return 1000 * (ended.at - self.at)

    monkeypatch.setattr(torch, "Event", Event)

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def layers(time_passes: Callable[[float], None]) -> nn.Sequential:
    """Layers that gather their weights, within one that does too, as the units of FSDP; and one that does not."""
    return nn.Sequential(
        Layer(time_passes, 1.0, 5.0), nn.Sequential(Layer(time_passes, 2.0, 7.0)), Layer(time_passes, 0.0, 11.0)
    )


def test_waiting_for_weights_is_no_work_of_a_forward_pass(time_passes: Callable[[float], None]) -> None:
    model = layers(time_passes)
    clock = Clock()
    waits = HostWaits([model, model[0], model[1][0]], clock)
    clock.mark(FORWARD)
    model(torch.zeros(1))
    clock.mark(BACKWARD)
    model(torch.zeros(1))  # as activations are computed again: all of it is in the backward pass
    clock.mark(FORWARD)
    waits.close()
    model(torch.zeros(1))  # as after a run
    assert clock.read() == {"other": 0.0, FORWARD: 23.0 + 26.0, WAITING: 3.0, BACKWARD: 26.0}


def test_waiting_that_an_error_cut_off_does_not_go_on(time_passes: Callable[[float], None]) -> None:
    layer = Layer(time_passes, 1.0, 5.0)
    failing = layer.register_forward_pre_hook(fails)
    clock = Clock()
    HostWaits([layer], clock)
    clock.mark(FORWARD)
    with pytest.raises(MemoryError):
        layer(torch.zeros(1))
    failing.remove()
    clock.mark(EVALUATION)
    layer(torch.zeros(1))
    assert clock.phase == EVALUATION
    clock.mark(FORWARD)
    layer(torch.zeros(1))
    assert clock.read() == {"other": 0.0, WAITING: 1.0 + 1.0, EVALUATION: 6.0, FORWARD: 5.0}


def fails(module: object, inputs: object) -> None:
    raise MemoryError


def test_on_device_forward_passes_and_their_waiting_are_told_apart_by_events(
    time_passes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With events that stand in for those of a device, since a host has none."""
    monkeypatch.setattr(extension, "get_kind", lambda device: SimpleNamespace(has_streams=True))
    model = layers(time_passes)
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    clock = Clock()
    run: Any = SimpleNamespace(
        progress=SimpleNamespace(state=state, clock=clock),
        setup=SimpleNamespace(model=model),
        plan=SimpleNamespace(micro_batches=2),
    )
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"),
        modules_that_wait=lambda model: [model, model[0], model[1][0]],
        gather_replica_objects=lambda place: [place],
    )
    slow = SlowRanks(engine, "nowhere")
    slow.begin(run)
    for _ in range(3):
        slow.window(None)
        for _ in range(2):
            model(torch.zeros(1))
            slow.micro_batch(None)  # type: ignore[arg-type]
            time_passes(100.0)  # the backward pass
        state.global_step += 1
        model(torch.zeros(1))  # an evaluation
    steps, *seconds = slow.share()
    found = dict(zip(PHASES, seconds, strict=True))
    assert (steps, found[FORWARD], found[WAITING]) == (3.0, 3 * 2 * 23.0, 3 * 2 * 3.0)
    slow.close()


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
    assert 60 <= late["step"] <= 90, "its forward passes may be slow in between, where other work runs"
    assert done.out.count("Process 1 (") == 2, "the main process tells it"
    assert "It loses most in reading data." in done.out
    (table,) = record.of("processes")
    first, second = sorted(table["milliseconds_a_step"], key=lambda row: row["rank"])
    assert second["forward"] > first["forward"] + 10
    assert first["waiting"] > second["waiting"]
    assert any("Processes, milliseconds of a step" in part for part in tables(record))


@pytest.mark.slow  # seconds of steps that are made long
@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("engine", "phase", "num"),
    [
        ("fsdp", FORWARD, 2),
        ("fsdp", FORWARD, 4),
        ("fsdp", DATA, 4),
        ("fsdp", "none", 4),
        pytest.param("zero", FORWARD, 2, marks=needs("deepspeed")),
    ],
)
def test_where_forward_passes_wait_for_each_other_slow_process_is_named_too(
    engine: str, phase: str, num: int, tmp_path: Path
) -> None:
    """30 % slower than the others, for 40 steps; nobody where all are alike."""
    script = Path(__file__).with_name("slow_in_forward.py")
    environment = {"DS_ACCELERATOR": "cpu"} if engine == "zero" else None
    done = run_ranks(
        script,
        *(str(tmp_path / "run"), engine, phase),
        folder=tmp_path,
        processes=num,
        timeout_s=150,
        environment=environment,
    )
    record = read(tmp_path / "run")
    last = num - 1
    found = {(entry["rank"], entry["phase"]) for entry in record.of("slow_rank")}
    told = [entry["text"] for entry in warnings(record) if "is slow" in entry["text"]]
    assert done.out.count("is slow") == len(told), "the main process tells it"
    (table,) = record.of("processes")
    times = {row["rank"]: row for row in table["milliseconds_a_step"]}
    assert times.keys() == {*range(num)}
    assert any("Processes, milliseconds of a step" in part for part in tables(record))
    if phase == "none":
        assert (found, told) == (set(), [])
        return
    assert found == {(last, phase)}
    (text,) = told
    assert text.startswith(f"Process {last} ({socket.gethostname()}, cpu) is slow: since step ")
    assert f"It loses most in {WORDS[phase][0]}." in text
    assert all(times[last][phase] > times[rank][phase] for rank in range(last))
    assert all(times[last][WAITING] < times[rank][WAITING] for rank in range(last)), "who waits least"
