"""DataWait: how much of the time between two logs the loop spent waiting for data."""

from __future__ import annotations

from time import perf_counter


class DataWait:
    """Adds up waits; two readings of the clock and one addition a step."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.num_waits = 0
        self.is_said = False  # advice is given once
        self._since = perf_counter()

    def add(self, seconds: float) -> None:
        self.waited_s += seconds
        self.num_waits += 1

    def look(self) -> tuple[float, float, int]:
        """Seconds waited, seconds in all, and waits since the last look; begins anew."""
        now = perf_counter()
        found = self.waited_s, now - self._since, self.num_waits
        self.waited_s, self.num_waits, self._since = 0.0, 0, now
        return found
