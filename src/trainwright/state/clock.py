"""Clock: where the time of a run goes. At any moment one phase is under way, so the phases add up to the wall time.

A mark is one function call and one reading of the time. On an accelerator the host's time is what is measured: work
that was launched there is waited for where the loop first reads a number back.
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
    """Attributes to one phase after the other the seconds between two marks.

    Attributes:
        seconds: by phase, up to the last mark.
        phase: the one under way.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.phase = OTHER
        self._since = perf_counter()

    def restart(self) -> None:
        """Forgets what was measured; from now on the time of a new run is counted."""
        self.seconds.clear()
        self.phase = OTHER
        self._since = perf_counter()

    def mark(self, phase: str) -> str:
        """From now on it is `phase`; returns the one before, to go back to at the end of something nested."""
        now = perf_counter()
        before = self.phase
        self.seconds[before] += now - self._since
        self.phase, self._since = phase, now
        return before

    def read(self) -> dict[str, float]:
        """Seconds by phase until now."""
        self.mark(self.phase)
        return dict(self.seconds)
