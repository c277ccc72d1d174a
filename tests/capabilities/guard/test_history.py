"""Spikes by median and MAD: as computed the long way, whatever the values are."""

import math
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.capabilities.guard.history import SD_PER_MAD, SpikeHistory
from trainwright.capabilities.guard.incident_log import IncidentLog
from trainwright.capabilities.guard.plan import GuardPlan
from trainwright.capabilities.guard.step_guard import HostGuard, Spikes
from trainwright.loop.extension import Decision, StepFacts
from trainwright.state.progress import Clock
from trainwright.state.trainer_state import TrainerState


def by_definition(values: list[float], value: float, threshold: float) -> bool:
    median = statistics.median_low(values)
    mad = statistics.median_low([abs(one - median) for one in values])
    return value - median > threshold * SD_PER_MAD * mad


@pytest.mark.parametrize("window", [1, 2, 7, 64])
@pytest.mark.parametrize("threshold", [1.0, 2.5, 6.0])
def test_spikes_are_those_of_the_definition(window: int, threshold: float) -> None:
    draw = random.Random(window * 10 + int(threshold))
    history = SpikeHistory(window=window, warmup=1, threshold=threshold)
    kept = []
    num_spikes = 0
    for _ in range(400):
        value = draw.choice([draw.gauss(5, 1), draw.gauss(5, 1), draw.expovariate(0.1), float(draw.randint(1, 3))])
        if kept:
            assert history.is_spike(value) == by_definition(kept, value, threshold)
            num_spikes += history.is_spike(value)
        history.add((value,))
        kept = [*kept, value][-window:]
        assert history.values == kept
    assert 0 < num_spikes < 400


STREAMS = {
    "steady": lambda draw, step: draw.gauss(5, 1),
    "falling": lambda draw, step: 5 / (1 + step) + draw.expovariate(9),
    "rising": lambda draw, step: step + draw.gauss(0, 1),
    "few values": lambda draw, step: float(draw.randint(1, 3)),
    "two levels": lambda draw, step: 100.0 * (step // 50 % 2) + draw.random(),
    "huge and tiny": lambda draw, step: draw.choice([-1, 1]) * 10.0 ** draw.randint(-320, 307),
}


class Collecting:
    """A history to which values are added together, as long as its bound holds."""

    def __init__(self, *, window: int, warmup: int, threshold: float) -> None:
        self.history = SpikeHistory(window=window, warmup=warmup, threshold=threshold)
        self.collected: list[float] = []

    def is_spike(self, value: float) -> bool:
        if len(self.collected) <= self.history.room and value <= self.history.bound:
            return False
        self.history.add(self.collected)
        self.collected = []
        return self.history.is_spike(value)


@pytest.mark.parametrize("window", [1, 7, 40, 128])
@pytest.mark.parametrize("stream", STREAMS)
def test_no_value_up_to_the_bound_is_a_spike(stream: str, window: int) -> None:
    def exactly(value: float) -> bool:
        fresh = SpikeHistory(window=window, warmup=5, threshold=3.0)
        fresh.load([*values.history.values, *values.collected])
        return fresh.is_spike(value)

    draw = random.Random(window)
    values = Collecting(window=window, warmup=5, threshold=3.0)
    num_bounds = 0
    for step in range(300):
        value = STREAMS[stream](draw, step)
        assert values.is_spike(value) == exactly(value)
        assert not exactly(values.history.bound)
        num_bounds += math.isfinite(values.history.bound)
        values.collected.append(value)
    assert num_bounds > 50


def test_the_window_is_seldom_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    values = Collecting(window=128, warmup=64, threshold=6.0)
    sorts = []
    find_bound = values.history._find_bound
    monkeypatch.setattr(values.history, "_find_bound", lambda number: (sorts.append(1), find_bound(number))[1])
    for _ in range(1064):
        value = draw.gauss(5, 1)
        assert not values.is_spike(value)
        values.collected.append(value)
    assert 50 < len(sorts) < 80  # of 1,000: an eighth of the window passes before the next one


@pytest.mark.parametrize("stream", STREAMS)
def test_a_guard_decides_by_the_accepted_values_of_both_histories(stream: str) -> None:
    plan = GuardPlan(on_spike="skip", spike_window=40, spike_warmup=5, spike_threshold=3.0, max_skipped_steps=0)
    log = IncidentLog(lambda incident: None, max_skipped=0, record=lambda incident, window: incident)
    spikes = Spikes(plan)
    draw = random.Random(3)
    guard = HostGuard("skip", log, spikes, is_alone=True)
    losses = []
    norms = []
    num_spikes = 0
    for step in range(300):
        loss = STREAMS[stream](draw, step)
        norm = abs(STREAMS[stream](draw, step))
        meter = SimpleNamespace(read_step_loss=lambda loss=loss: loss)
        window = SimpleNamespace(current=None)
        progress = SimpleNamespace(meter=meter, state=TrainerState(), window=window, clock=Clock())
        run: Any = SimpleNamespace(progress=progress, extensions=SimpleNamespace(listen_anew=lambda: None))
        is_spike = len(losses) >= 5 and (by_definition(losses, loss, 3.0) or by_definition(norms, norm, 3.0))
        decision = guard.decide(StepFacts(run, norm, None, None))
        assert (decision is Decision.SKIP) == is_spike
        num_spikes += is_spike
        if not is_spike:
            losses = [*losses, loss][-40:]
            norms = [*norms, norm][-40:]
        if step % 7 == 0:
            assert guard.state()["accepted"] == {"loss": losses, "grad_norm": norms}
    assert log.num_skipped == num_spikes < 300


def test_the_example_in_the_head_of_the_file() -> None:
    history = SpikeHistory(window=9, warmup=5, threshold=2.0)
    history.load([9.0, 1.0, 4.0, 2.0])
    assert not history.is_spike(1e9)  # the fifth value is missing
    history.add((3.0,))
    assert history.is_spike(6.0)
    assert not history.is_spike(5.9)
    assert not history.is_spike(-1e9)


def test_equal_values_do_not_make_rounding_a_spike() -> None:
    history = SpikeHistory(window=9, warmup=2, threshold=6.0)
    history.load([2.0] * 5)
    assert not history.is_spike(2.0000001)
    assert history.is_spike(2.1)
