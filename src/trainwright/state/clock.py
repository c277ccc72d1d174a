"""Clock: seconds of a run by phase. There is one phase at any moment, so the phases add up to the wall time.

A mark is one function call and one reading of the time. On an accelerator the host's time is measured: asynchronous
work counts in the phase in which the loop first reads a number back.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter

DATA = "data"  # waiting for the loader
HOST_TO_DEVICE = "host_to_device"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"  # clipping, the step, the schedule
LOGGING = "logging"
EVALUATION = "evaluation"
SAVING = "saving"
CALLBACKS = "callbacks"  # `callbacks.<class>`: each class of callbacks by name
OTHER = "other"  # the loop itself, and what happens before the first and after the last step


class Clock:
    """Counts the seconds between two marks for the phase that was marked first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)  # by phase, up to the last mark
        self.phase = OTHER  # the current one
        self._since = perf_counter()

    def restart(self) -> None:
        """Clears all seconds, for a new run."""
        self.seconds.clear()
        self.phase = OTHER
        self._since = perf_counter()

    def mark(self, phase: str) -> str:
        """Begins a phase; returns the one before, which a nested piece of work marks again at its end."""
        now = perf_counter()
        before = self.phase
        self.seconds[before] += now - self._since
        self.phase, self._since = phase, now
        return before

    def read(self) -> dict[str, float]:
        """Returns the seconds by phase until now."""
        self.mark(self.phase)
        return dict(self.seconds)
