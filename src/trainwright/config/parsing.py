"""Short forms of values: lengths of time ("1h30m"), steps of a run ("10-15"), factors of a learning rate ("0.1x")."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import Any, NamedTuple

SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
DURATIONS = "Write '90s', '20min', '8h', '1h30m', or a number of seconds."
STEPS = "Write '10-15' for these steps, or '5' for five steps after the first two."
WARM_UP = 2  # steps at the beginning of a run that are slower than the rest

_PART = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+)")


def parse_duration(value: Any) -> float:  # Any: what a user passed
    """Parses "90s", "20min", "8h", "1h30m" or a number of seconds above 0 into seconds; else raises ValueError."""
    if isinstance(value, Real) and not isinstance(value, bool):
        result = float(value)
    elif isinstance(value, str):
        result = _of_text(value.strip().lower())
    else:
        raise ValueError(f"{value!r} is no length of time. {DURATIONS}")
    if not 0 < result < math.inf:
        raise ValueError(f"{value!r} is no length of time above 0. {DURATIONS}")
    return result


def _of_text(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    parts = list(_PART.finditer(text))
    rest = _PART.sub("", text).strip()
    unknown = sorted({part["unit"] for part in parts} - set(SECONDS))
    if unknown:
        raise ValueError(f"{text!r}: {', '.join(unknown)} is no unit of time; s, min (or m), h and d are. {DURATIONS}")
    if rest or not parts:
        raise ValueError(f"{text!r} is no length of time. {DURATIONS}")
    return sum(float(part["number"]) * SECONDS[part["unit"]] for part in parts)


class StepRange(NamedTuple):
    """Steps of a run, the last one included; counted from where the run begins if there is no first one."""

    first: int | None
    num: int

    @property
    def last(self) -> int | None:
        return None if self.first is None else self.first + self.num - 1


def parse_steps(value: Any) -> StepRange:  # Any: what a user passed
    """Parses the steps that a profiler traces: "10-15", or a number of steps; else raises ValueError."""
    text = str(value).strip() if isinstance(value, (str, Integral)) and not isinstance(value, bool) else ""
    match = re.fullmatch(r"(?:(?P<first>\d+)\s*-\s*)?(?P<last>\d+)", text)
    if match is None:
        raise ValueError(f"{value!r} names no steps. {STEPS}")
    last = int(match["last"])
    first = None if match["first"] is None else int(match["first"])
    if last < 1 or (first is not None and not 1 <= first <= last):
        raise ValueError(f"{value!r} names no steps: they count from 1, and the last is not before the first.")
    return StepRange(None, last) if first is None else StepRange(first, last - first + 1)


def parse_factor(value: Any) -> float | None:  # Any: what a user passed
    """Parses a factor: 0.1 of "0.1x" or "x0.1"; None for what is no factor."""
    match = re.fullmatch(r"x(?P<after>\S+)|(?P<before>\S+)x", value) if isinstance(value, str) else None
    if match is None:
        return None
    try:
        factor = float(match["after"] or match["before"])
    except ValueError:
        return None
    return factor if 0 <= factor < math.inf else None
