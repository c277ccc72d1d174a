"""Spikes by median and MAD: as computed the long way, whatever the values are."""

import math
import random
import statistics

import pytest

from trainwright.guard.history import SD_PER_MAD, SpikeHistory


def by_definition(values: list[float], value: float, threshold: float) -> bool:
    median = statistics.median_low(values)
    mad = statistics.median_low([abs(one - median) for one in values])
    return value - median > threshold * SD_PER_MAD * mad


@pytest.mark.parametrize("window", [1, 2, 7, 64])
@pytest.mark.parametrize("threshold", [1.0, 2.5, 6.0])
def test_spikes_are_those_of_the_definition(window: int, threshold: float) -> None:
    draw = random.Random(window * 10 + int(threshold))
    history, kept, num_spikes = SpikeHistory(window=window, warmup=1, threshold=threshold), [], 0
    for _ in range(400):
        value = draw.choice([draw.gauss(5, 1), draw.gauss(5, 1), draw.expovariate(0.1), float(draw.randint(1, 3))])
        if kept:
            assert history.is_spike(value) == by_definition(kept, value, threshold)
            num_spikes += history.is_spike(value)
        history.add(value)
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


@pytest.mark.parametrize("window", [1, 7, 40, 128])
@pytest.mark.parametrize("stream", STREAMS)
def test_no_value_up_to_the_bound_is_a_spike(stream: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def exactly(value: float) -> bool:
        fresh = SpikeHistory(window=window, warmup=5, threshold=3.0)
        fresh.load(history.values)
        return fresh.is_spike(value)

    draw, history, num_bounds = random.Random(window), SpikeHistory(window=window, warmup=5, threshold=3.0), 0
    for step in range(300):
        value = STREAMS[stream](draw, step)
        assert history.is_spike(value) == exactly(value)
        assert not exactly(history.bound)
        num_bounds += math.isfinite(history.bound)
        history.add(value)
    assert num_bounds > 50


def test_the_window_is_seldom_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, history, sorts = random.Random(3), SpikeHistory(window=128, warmup=64, threshold=6.0), []
    find_bound = history._find_bound
    monkeypatch.setattr(history, "_find_bound", lambda ordered: (sorts.append(1), find_bound(ordered))[1])
    for _ in range(1064):
        value = draw.gauss(5, 1)
        assert not history.is_spike(value)
        history.add(value)
    assert 80 < len(sorts) < 110  # of 1,000: a tenth of the window passes before the next one


def test_the_example_in_the_head_of_the_file() -> None:
    history = SpikeHistory(window=9, warmup=5, threshold=2.0)
    history.load([9.0, 1.0, 4.0, 2.0])
    assert not history.is_spike(1e9)  # the fifth value is missing
    history.add(3.0)
    assert history.is_spike(6.0)
    assert not history.is_spike(5.9)
    assert not history.is_spike(-1e9)


def test_equal_values_do_not_make_rounding_a_spike() -> None:
    history = SpikeHistory(window=9, warmup=2, threshold=6.0)
    history.load([2.0] * 5)
    assert not history.is_spike(2.0000001)
    assert history.is_spike(2.1)
