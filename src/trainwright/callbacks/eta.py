"""Eta: how long a step takes and how long a run will; pauses for evaluations and saves are counted apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

WEIGHT = 0.05  # of the newest step in the running mean


class RunningMean:
    """A running mean that forgets, correct from the first value on."""

    def __init__(self, weight: float) -> None:
        self._weight, self._sum, self._norm = weight, 0.0, 0.0

    def add(self, value: float) -> None:
        self._sum = (1 - self._weight) * self._sum + self._weight * value
        self._norm = (1 - self._weight) * self._norm + self._weight

    @property
    def value(self) -> float | None:
        return self._sum / self._norm if self._norm else None


class Eta:
    """Told of the end of each step, and of what follows it before the next one begins."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = RunningMean(WEIGHT)
        self._pauses: dict[str, RunningMean] = {}
        self._last: float | None = None
        self._next_pause: str | None = None

    def step_done(self, *, pause: str | None = None) -> None:
        """A step is done; `pause` says what comes before the next one, if anything does."""
        now = self._clock()
        if self._last is not None:
            took = now - self._last
            if self._next_pause is None:
                self._step.add(took)
            else:
                self._pauses.setdefault(self._next_pause, RunningMean(0.3)).add(
                    max(0.0, took - (self._step.value or 0.0))
                )
        self._last, self._next_pause = now, pause

    @property
    def step_s(self) -> float | None:
        """Seconds of a step without pauses; None before two are done."""
        return self._step.value

    def left_s(self, num_steps: int, num_pauses: Mapping[str, int]) -> float | None:
        """Seconds that so many steps will take, with so many pauses of each kind; those not seen yet count nothing."""
        if self._step.value is None:
            return None
        pauses = sum(
            num * (self._pauses[kind].value or 0.0) for kind, num in num_pauses.items() if kind in self._pauses
        )
        return num_steps * self._step.value + pauses
