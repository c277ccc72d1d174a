"""Lengths of time as people write them: "90s", "20min", "8h", "1h30m", or a number of seconds."""

from __future__ import annotations

import math
import re
from numbers import Real
from typing import Any

SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
EXAMPLES = "Write '90s', '20min', '8h', '1h30m', or a number of seconds."

_PART = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+)")


def seconds(value: Any) -> float:  # Any: what a user passed
    """The seconds that `value` means.

    Raises:
        ValueError: it means no length of time above 0.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        result = float(value)
    elif isinstance(value, str):
        result = _of_text(value.strip().lower())
    else:
        raise ValueError(f"{value!r} is no length of time. {EXAMPLES}")
    if not 0 < result < math.inf:
        raise ValueError(f"{value!r} is no length of time above 0. {EXAMPLES}")
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
        raise ValueError(f"{text!r}: {', '.join(unknown)} is no unit of time; s, min (or m), h and d are. {EXAMPLES}")
    if rest or not parts:
        raise ValueError(f"{text!r} is no length of time. {EXAMPLES}")
    return sum(float(part["number"]) * SECONDS[part["unit"]] for part in parts)


def text(value_s: float) -> str:
    """A length of time for a person: 1h 30min, 20min, 90s."""
    if value_s < 120:
        return f"{value_s:g}s"
    minutes = round(value_s / 60)
    hours, minutes = divmod(minutes, 60)
    return " ".join(part for part in (f"{hours}h" if hours else "", f"{minutes}min" if minutes else "") if part)
