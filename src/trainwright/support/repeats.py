"""Says a failure once for each cause, and counts the others: a partner that fails for hours fails in the same way."""

from __future__ import annotations

import re
from collections import Counter

CHANGING = re.compile(r"[0-9a-f]*\d[0-9a-f-]*", re.IGNORECASE)  # numbers of requests, times, ports
MAX_CAUSE = 200  # characters


class RepeatedFailures:
    """Failures of one partner in a run, by their causes."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._recovered: set[str] = set()

    def is_new(self, error: BaseException) -> bool:
        """Counts a failure; returns whether it is the first of its cause."""
        cause = describe_cause(error)
        self._counts[cause] += 1
        return self._counts[cause] == 1

    def is_first_recovery(self, error: BaseException) -> bool:
        """Returns whether the end of a failure is the first of its cause."""
        cause = describe_cause(error)
        is_first = cause not in self._recovered
        self._recovered.add(cause)
        return is_first

    @property
    def num_repeated(self) -> int:
        """Number of failures whose cause had been said before."""
        return self._counts.total() - len(self._counts)


def describe_cause(error: BaseException) -> str:
    """Returns a text that is equal for errors that say the same: their kind, and what they say without numbers."""
    number = getattr(error, "errno", None)
    # names of files differ between two failures of one disk
    said = str(error) if number is None else getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__} {number}: {CHANGING.sub('#', said)[:MAX_CAUSE]}"
