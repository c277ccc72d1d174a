"""SpikeHistory: the last accepted values of one measurement, and whether a new one is far above them.

A value x is a spike if (x - median) / (1.4826 MAD) is beyond a threshold; MAD is the median of the distances from the
median, and 1.4826 MAD is the standard deviation of a normal distribution (Leys et al. 2013,
doi:10.1016/j.jesp.2013.03.013). One bad value moves neither of them, unlike mean and standard deviation. Both
medians are the lower one of an even number.

MAD itself is not computed: with r = (x - median) / (1.4826 threshold), the condition is MAD < r, hence that more than
half of the values lie within r of the median, which two binary searches in the sorted values count. Values 1 2 3 4 9,
threshold 2: median 3, distances 0 1 1 2 6, MAD 1. x = 6: r = 3 / 2.97 = 1.01, within it lie 2 3 4, three of five: a
spike. x = 5.9: r = 0.98, within it lies 3, one of five: none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable

SD_PER_MAD = 1.4826
ROUNDING = 1e-6  # of the median: smaller rises are no spike, even if all values are equal


class SpikeHistory:
    """Values in the order of steps, and sorted.

    Args:
        window: number of values that are kept.
        warmup: number of values that are needed before one can be a spike.
        threshold: robust deviations.
    """

    def __init__(self, *, window: int, warmup: int, threshold: float) -> None:
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._window = window
        self._warmup = min(warmup, window)
        self._threshold = threshold

    def is_spike(self, value: float) -> bool:
        """Returns True if a value is far above the history.

        Args:
            value: finite.
        """
        number = len(self._sorted)
        if number == 0 or number < self._warmup:
            return False
        middle = (number - 1) // 2
        median = self._sorted[middle]
        if value - median <= ROUNDING * abs(median):
            return False
        radius = (value - median) / (SD_PER_MAD * self._threshold)
        num_within = bisect_left(self._sorted, median + radius) - bisect_right(self._sorted, median - radius)
        return num_within > middle

    def add(self, value: float) -> None:
        """Adds an accepted value, and drops the oldest one beyond the window.

        Args:
            value: finite.
        """
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > self._window:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    @property
    def values(self) -> list[float]:
        """The values, oldest first."""
        return list(self._values)

    def load(self, values: Iterable[float]) -> None:
        """Replaces all values.

        Args:
            values: oldest first.
        """
        self._values.clear()
        self._sorted.clear()
        for value in values:
            self.add(value)
