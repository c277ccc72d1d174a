"""SpikeHistory: the last accepted values of one measurement, and whether a new one is far above them.

A value x is a spike if (x - median) / (1.4826 MAD) is beyond a threshold; MAD is the median of the distances from the
median, and 1.4826 MAD is the standard deviation of a normal distribution (Leys et al. 2013,
doi:10.1016/j.jesp.2013.03.013). One bad value moves neither of them, unlike mean and standard deviation. Both
medians are the lower one of an even number.

MAD itself is not computed: with r = (x - median) / (1.4826 threshold), the condition is MAD < r, hence that more than
half of the values lie within r of the median, which two binary searches in the sorted values count. Values 1 2 3 4 9,
threshold 2: median 3, distances 0 1 1 2 6, MAD 1. x = 6: r = 3 / 2.97 = 1.01, within it lie 2 3 4, three of five: a
spike. x = 5.9: r = 0.98, within it lies 3, one of five: none.

No list is sorted for an ordinary value. Sorting finds a bound up to which no value is a spike while the next k values
come, whatever they are (k is a twelfth of the window): each moves the median by one place at most, so it stays in
[a, b], k places to both sides, and each adds one at most to the values between low = a - r and high = b + r. As long as
these are at most half of all, MAD >= r, and a spike is above a + 1.4826 threshold r. Subtraction, division and addition
round monotonically, so the comparison above, as it is computed, agrees for each value up to the bound.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

SD_PER_MAD = 1.4826
ROUNDING = 1e-6  # of the median: smaller rises are no spike, even if all values are equal
SHRINK = 1e-9  # for rounding
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
        self._window, self._warmup = window, min(warmup, window)
        self._deviations = SD_PER_MAD * threshold
        self._values = array("d", bytes(8 * window))  # in a ring: value number i is in place i % window
        self._as_array = np.frombuffer(self._values)
        self._count = 0  # values that were added
        self._places = _places(0)
        self._last_for_bound = 0  # the bound holds until this value is added
        self.bound = NO_BOUND

    def is_spike(self, value: float) -> bool:
        """Returns True if a value is far above the history.

        Args:
            value: finite.
        """
        number = self._count if self._count < self._window else self._window
        if value <= self.bound or number == 0 or number < self._warmup:
            return False
        ordered = self._as_array[:number].copy()
        ordered.sort()  # a fifth of the instructions of a list's
        if value <= self._find_bound(ordered):
            return False
        middle = (number - 1) // 2
        median = ordered.item(middle)
        if value - median <= ROUNDING * abs(median):
            return False
        radius = (value - median) / self._deviations
        low, high = ordered.searchsorted(median - radius, "right"), ordered.searchsorted(median + radius, "left")
        return bool(high - low > middle)

    def _find_bound(self, ordered: NDArray[np.float64]) -> float:
        if self._places[0] != ordered.size:
            self._places = _places(ordered.size)
        _, left, least_at, a_at, b_at, most_at = self._places
        least, a, b, most = ordered.item(least_at), ordered.item(a_at), ordered.item(b_at), ordered.item(most_at)
        r = (a - least if a - least < most - b else most - b) * (1 - SHRINK)
        bound = a + self._deviations * r
        r = (bound - a) / self._deviations
        if not (a - r >= least and b + r <= most):  # rounded too far: only what is not above the median
            bound = a
        self.bound, self._last_for_bound = bound, self._count + left
        return bound

    def add(self, value: float) -> None:
        """Adds an accepted value, and drops the oldest one beyond the window.

        Args:
            value: finite.
        """
        count = self._count
        self._values[count % self._window] = value
        self._count = count + 1
        if count >= self._last_for_bound:
            self.bound = NO_BOUND

    @property
    def values(self) -> list[float]:
        """The values, oldest first."""
        if self._count < self._window:
            return list(self._values[: self._count])
        oldest = self._count % self._window
        return [*self._values[oldest:], *self._values[:oldest]]

    def load(self, values: Iterable[float]) -> None:
        """Replaces all values.

        Args:
            values: oldest first.
        """
        self._count = self._last_for_bound = 0
        for value in values:
            self.add(value)


def _places(number: int) -> tuple[int, int, int, int, int, int]:
    """Number of values, of those that may come, and the places of low, a, b and high among the sorted ones."""
    middle, left = (number - 1) // 2, number // 12
    beside = max(middle - 3 * left - 1, 0)  # values on both sides of a to b that may lie within
    below, above = middle - left - 1 - beside // 2, middle + left + 1 + beside - beside // 2
    return number, left, max(below, 0), middle - left, middle + left, min(above, number - 1)
