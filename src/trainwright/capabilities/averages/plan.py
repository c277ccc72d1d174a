"""The value of `average`, a kind or a dict with options, read into a plan; `extension.py` carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any  # for values as the user wrote them

from trainwright.errors import did_you_mean

Check = Callable[[object], bool]

KINDS = ("ema", "swa", "lawa")
MEMORY = ("device", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragePlan:
    """Average of the weights, kept in addition to them."""

    kind: str  # "ema" (exponential), "swa" (mean of all entries) or "lawa" (mean of the last entries)
    decay: float = 0.999  # ema: share of the average that stays at an entry
    warmup: bool = True  # ema: the share is at most (1 + n) / (10 + n) after n entries
    last: int = 5  # lawa: number of entries
    every: int = 1  # steps from one entry to the next
    start: float = 0.0  # steps before the first entry; below 1: share of all steps
    in_host_memory: bool = False  # kept in main memory, not on the device of the weights


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# Option: the kinds that have it, whether a value may be given, and the values in words.
OPTIONS: Mapping[str, tuple[tuple[str, ...], Check, str]] = {
    "decay": (("ema",), lambda value: _is_number(value) and 0 <= value < 1, "at least 0 and below 1"),  # type: ignore[operator]
    "warmup": (("ema",), lambda value: isinstance(value, bool), "true or false"),
    "last": (("lawa",), _is_count, "a whole number of at least 1"),
    "every": (KINDS, _is_count, "a whole number of steps of at least 1"),
    "start": (
        KINDS,
        lambda value: _is_number(value) and value >= 0 and (value < 1 or value == int(value)),  # type: ignore[operator, call-overload]
        "a number of steps, or a share of all steps below 1",
    ),
    "memory": (KINDS, lambda value: value in MEMORY, "device or host"),
}


def parse_average(value: object) -> AveragePlan:
    """Reads the value of `average`.

    Args:
        value: a kind, or a dict with `kind` and options.

    Raises:
        ValueError: it is not one; the message names the allowed values.
    """
    options: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"kind": value}
    kind = options.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}. Write 'ema', or {{'kind': 'ema', ...}}.")
    allowed = [name for name, (kinds, *_) in OPTIONS.items() if kind in kinds]
    for name, given in options.items():
        if name not in allowed:
            near = did_you_mean(str(name), allowed)
            raise ValueError(f"{kind} has no option {name!r}.{near} Its options: {', '.join(allowed)}.")
        _, is_allowed, words = OPTIONS[name]
        if not is_allowed(given):
            raise ValueError(f"{name} is {given!r}; it must be {words}.")
    in_host_memory = options.pop("memory", "device") == "host"
    return AveragePlan(kind=kind, in_host_memory=in_host_memory, **options)
