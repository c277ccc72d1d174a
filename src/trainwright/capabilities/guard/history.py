"""SpikeHistory: the last accepted values of a measurement, and whether a new value is far above them.

A value x is a spike if (x - median) / (1.4826 MAD) is beyond a threshold; MAD is the median of the distances from the
median, and 1.4826 MAD is the standard deviation of a normal distribution (Leys et al. 2013,
doi:10.1016/j.jesp.2013.03.013). One bad value moves neither of them, unlike mean and standard deviation. For an even
number of values, both use the lower median.

MAD itself is not computed: with r = (x - median) / (1.4826 threshold), the condition is MAD < r, so that more than half
the values are within r of the median; two binary searches in the sorted values count them. Example: values 1 2 3 4
9, threshold 2: median 3, distances 0 1 1 2 6, MAD 1. For x = 6, r = 3 / 2.97 = 1.01 and 2 3 4 are within it, three of
five: a spike. For x = 5.9, r = 0.98 and only 3 is within it: no spike.

No list is sorted for an ordinary value. Sorting yields a bound up to which no value is a spike while the next k values
come, whatever they are (k is an eighth of the window). They replace the k oldest values; with any k values added to the
rest, the median is in [a, b], k positions apart among the remaining values. If the interval from a - r to b + r holds
at most half of all values minus k, MAD >= r whatever comes, and a spike is above a + 1.4826 threshold r. Subtraction,
division and addition round monotonically, so the comparison above, as computed, agrees for each value up to the bound.
The caller that compares values with the bound collects the k values, and adds them together.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

SD_PER_MAD = 1.4826
ROUNDING = 1e-6  # relative to the median: smaller rises are not spikes, even if all values are equal
SHRINK = 1e-9  # margin for rounding
NO_BOUND = float("-inf")
ROOM = 8  # the fraction 1/ROOM of the window may change before it is sorted again


class SpikeHistory:
    """Values in the order of steps, and an upper bound for ordinary values.

    Args:
        window: number of values to keep.
        warmup: number of values required before one can be a spike.
        threshold: in robust standard deviations.

    Attributes:
        bound: a finite value up to it is not a spike; a value above it may be.
        room: number of values that may be added at once; the bound holds for that many.
    """

    def __init__(self, *, window: int, warmup: int, threshold: float) -> None:
        self._window = window
        self._warmup = min(warmup, window)
        self._deviations = SD_PER_MAD * threshold
        self._values = array("d")  # oldest first
        self._places = _places(0, window)
        self.bound = NO_BOUND
        self.room = 0

    def is_spike(self, value: float) -> bool:
        """Returns True if a value is far above the history.

        Args:
            value: a finite number.
        """
        number = len(self._values)
        if value <= self.bound or number == 0 or number < self._warmup:
            return False
        if value <= self._find_bound(number):
            return False
        ordered = np.sort(self._values)
        middle = (number - 1) // 2
        median = ordered.item(middle)
        if value - median <= ROUNDING * abs(median):
            return False
        radius = (value - median) / self._deviations
        low = ordered.searchsorted(median - radius, "right")
        high = ordered.searchsorted(median + radius, "left")
        return bool(high - low > middle)

    def _find_bound(self, number: int) -> float:
        if self._places[0] != number:
            self._places = _places(number, self._window)
        _, room, first, least_at, a_at, b_at, most_at = self._places
        ordered = self._values[first:]  # the remaining values
        np.frombuffer(ordered).sort()  # takes a fifth of the instructions of sorting a list
        least = ordered[least_at]
        a = ordered[a_at]
        b = ordered[b_at]
        most = ordered[most_at]
        r = (a - least if a - least < most - b else most - b) * (1 - SHRINK)
        bound = a + self._deviations * r
        r = (bound - a) / self._deviations
        if not (a - r >= least and b + r <= most):  # rounded too far: only values not above the median are safe
            bound = a
        self.bound = bound
        self.room = room
        return bound

    def add(self, values: Iterable[float]) -> None:
        """Adds accepted values, and drops the oldest ones beyond the window.

        Args:
            values: finite numbers, oldest first.
        """
        self._values = (self._values + array("d", values))[-self._window :]
        self.bound = NO_BOUND
        self.room = 0

    @property
    def values(self) -> list[float]:
        """The values, oldest first."""
        return self._values.tolist()

    def load(self, values: Iterable[float]) -> None:
        """Replaces all values.

        Args:
            values: the new values, oldest first.
        """
        self._values = array("d")
        self.add(values)


def _places(number: int, window: int) -> tuple[int, int, int, int, int, int, int]:
    """Number of values, number that may come, index of the first to remain; sorted indices of low, a, b, high."""
    room = number // ROOM
    first = max(number + room - window, 0)
    num_kept = number - first
    middle = (num_kept + room - 1) // 2
    beside = max(middle + 1 - 2 * room, 0)  # distance from low to a and from b to high
    low = middle - room - beside // 2
    high = middle + beside - beside // 2
    return number, room, first, max(low, 0), max(middle - room, 0), middle, min(high, num_kept - 1)
