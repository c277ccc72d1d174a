"""Which steps a profiler traces, as people write them: "10-15", or a number of steps."""

from __future__ import annotations

import re
from numbers import Integral
from typing import Any, NamedTuple

EXAMPLES = "Write '10-15' for these steps, or '5' for five steps after the first two."
WARM_UP = 2  # steps of a training that are slower than the rest


class Traced(NamedTuple):
    """Steps of a run, both included; counted from where a training begins if there is no first one."""

    first: int | None
    num: int

    @property
    def last(self) -> int | None:
        return None if self.first is None else self.first + self.num - 1


def traced_steps(value: Any) -> Traced:  # Any: what a user passed
    """The steps that `value` means.

    Raises:
        ValueError: it means none.
    """
    text = str(value).strip() if isinstance(value, (str, Integral)) and not isinstance(value, bool) else ""
    match = re.fullmatch(r"(?:(?P<first>\d+)\s*-\s*)?(?P<last>\d+)", text)
    if match is None:
        raise ValueError(f"{value!r} names no steps. {EXAMPLES}")
    last = int(match["last"])
    first = None if match["first"] is None else int(match["first"])
    if last < 1 or (first is not None and not 1 <= first <= last):
        raise ValueError(f"{value!r} names no steps: they count from 1, and the last is not before the first.")
    return Traced(None, last) if first is None else Traced(first, last - first + 1)
