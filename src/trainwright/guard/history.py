"""SpikeHistory: the last accepted values of one measurement, and whether a new one is far above them.

A value x is a spike if (x - median) / (1.4826 MAD) is beyond a threshold; MAD is the median of the distances from the
median, and 1.4826 MAD is the standard deviation of a normal distribution (Leys et al. 2013,
doi:10.1016/j.jesp.2013.03.013). One bad value moves neither of them, unlike mean and standard deviation. Both
medians are the lower one of an even number.

MAD itself is not computed: with r = (x - median) / (1.4826 threshold), the condition is MAD < r, hence that more than
half of the values lie within r of the median, which two binary searches in the sorted values count. Values 1 2 3 4 9,
threshold 2: median 3, distances 0 1 1 2 6, MAD 1. x = 6: r = 3 / 2.97 = 1.01, within it lie 2 3 4, three of five: a
spike. x = 5.9: r = 0.98, within it lies 3, one of five: none.

No list is sorted for an ordinary value. Sorting finds a bound up to which no value is a spike, and counts that prove
it: the median is in [a, b], and at most half of the values lie between low = a - r and high = b + r, so that MAD >= r
and a spike is above a + 1.4826 threshold r. The counts follow the values that come and go, and the bound holds until
they do not prove it any more. Subtraction, division and addition round monotonically, so the comparison above, as it is
computed, agrees for each value up to the bound.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable

SD_PER_MAD = 1.4826
ROUNDING = 1e-6  # of the median: smaller rises are no spike, even if all values are equal
NO_BOUND = float("-inf")


class SpikeHistory:
    """Values in the order of steps, and a bound of ordinary ones.

    Args:
        window: number of values that are kept.
        warmup: number of values that are needed before one can be a spike.
        threshold: robust deviations.

    Attributes:
        bound: a finite value up to it is no spike; a value above it may be one.
    """

    def __init__(self, *, window: int, warmup: int, threshold: float) -> None:
        self._values: deque[float] = deque()
        self._window = window
        self._warmup = min(warmup, window)
        self._deviations = SD_PER_MAD * threshold
        self.bound = NO_BOUND
        self._anchors = 0.0, 0.0, 0.0, 0.0  # low, a, b, high
        self._num_below = self._num_above = self._num_within = 0  # values < a, > b, and between low and high

    def is_spike(self, value: float) -> bool:
        """Returns True if a value is far above the history.

        Args:
            value: finite.
        """
        number = len(self._values)
        if value <= self.bound or number == 0 or number < self._warmup:
            return False
        ordered = sorted(self._values)
        self._find_bound(ordered)
        middle = (number - 1) // 2
        median = ordered[middle]
        if value - median <= ROUNDING * abs(median):
            return False
        radius = (value - median) / self._deviations
        return _num_between(ordered, median - radius, median + radius) > middle

    def _find_bound(self, ordered: list[float]) -> None:
        number = len(ordered)
        middle, margin = (number - 1) // 2, number // 12  # values that may move before the bound is lost
        first, last = middle - margin, middle + margin
        a, b = ordered[first], ordered[last]
        more = max(middle - 3 * margin - 1, 0)  # values beside a to b that may lie within
        below = more // 2
        r = min(a - ordered[max(first - 1 - below, 0)], ordered[min(last + 1 + more - below, number - 1)] - b)
        self.bound = a + self._deviations * r
        radius = (self.bound - a) / self._deviations
        low, high = a - radius, b + radius
        self._num_below, self._num_above = first, number - 1 - last  # or fewer, where values are equal
        self._num_within = _num_between(ordered, low, high) if low < high else 0
        if self._num_within > middle:
            self.bound, low, high, self._num_within = a, a, a, 0  # what is not above the median
        self._anchors = low, a, b, high

    def add(self, value: float) -> None:
        """Adds an accepted value, and drops the oldest one beyond the window.

        Args:
            value: finite.
        """
        values = self._values
        values.append(value)
        low, a, b, high = self._anchors
        number = len(values)
        if number > self._window:
            old, number = values.popleft(), number - 1
            below, above = (value < a) - (old < a), (value > b) - (old > b)
            within = (low < value < high) - (low < old < high)
        else:
            below, above, within = int(value < a), int(value > b), int(low < value < high)
        if below or above or within:
            self._num_below += below
            self._num_above += above
            self._num_within += within
            middle = (number - 1) // 2
            if self._num_below > middle or self._num_above >= number - middle or self._num_within > middle:
                self.bound = NO_BOUND

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
        self.bound = NO_BOUND
        for value in values:
            self.add(value)


def _num_between(ordered: list[float], low: float, high: float) -> int:
    return bisect_left(ordered, high) - bisect_right(ordered, low)
