"""Eta: estimates of the seconds of a step and of a run; pauses for evaluations and saves are counted separately."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

WEIGHT = 0.05  # of the newest step in the running mean


class RunningMean:
    """Exponential running mean, without bias from the first value on.

    Args:
        weight: of the newest value, in (0, 1].
    """

    def __init__(self, weight: float) -> None:
        self._weight, self._sum, self._norm = weight, 0.0, 0.0

    def add(self, value: float) -> None:
        """Adds a value."""
        self._sum = (1 - self._weight) * self._sum + self._weight * value
        self._norm = (1 - self._weight) * self._norm + self._weight

    @property
    def value(self) -> float | None:
        """The mean; None before the first value."""
        return self._sum / self._norm if self._norm else None


class Eta:
    """Measures the time of steps and of the pauses between them.

    Args:
        clock: returns seconds; monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = RunningMean(WEIGHT)
        self._pauses: dict[str, RunningMean] = {}
        self._last: float | None = None
        self._next_pause: str | None = None

    def step_done(self, *, pause: str | None = None) -> None:
        """Marks the end of a step.

        Args:
            pause: kind of the pause before the next step ("evaluation", "save"); None if there is none.
        """
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
        """Estimates the seconds of the rest of a run.

        Args:
            num_steps: steps left.
            num_pauses: pauses left, by kind; kinds not measured yet count as 0 s.

        Returns:
            Seconds; None before two steps are done.
        """
        if self._step.value is None:
            return None
        pauses = sum(
            num * (self._pauses[kind].value or 0.0) for kind, num in num_pauses.items() if kind in self._pauses
        )
        return num_steps * self._step.value + pauses
