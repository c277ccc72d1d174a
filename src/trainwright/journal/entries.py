"""The form of journal entries: a line of a file is an entry if each field that readers know is of its type.

Readers take the fields as they are, so a line with a wrong value counts as one that a killed process did not finish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from trainwright.support.door import MALFORMED, parse_json, parse_number, parse_step, without_halves

MAX_LINE = 1 << 24  # bytes of an entry; a longer one is left out
LAST_TIME = 1 << 37  # seconds since 1970 that a calendar has
MAX_COUNT = 1 << 63

Entry = dict[str, Any]  # Any: whatever JSON holds
Check: TypeAlias = Callable[[Any], object]  # raises ValueError, TypeError or KeyError for a value of another form


def parse_entry(line: bytes) -> Entry | None:
    """Returns the entry in a line of a journal; None if there is none, or a field has a wrong value."""
    try:
        entry = without_halves(parse_json(line))
        fields = _COMMON | _FIELDS.get(entry["kind"], {})
        found = {name: value for name, value in entry.items() if value is not None or name not in fields}
        _mapping(**fields)(found)
        for name in ("run", *_REQUIRED.get(found["kind"], ())):
            found[name]
    except MALFORMED:
        return None
    return found


def _text(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError


def _switch(value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError


def _count(value: object) -> None:
    parse_number(value, least=0, most=MAX_COUNT)


def _positive(value: object) -> None:
    parse_number(value, least=1, most=MAX_COUNT)


def _time(value: object) -> None:
    parse_number(value, least=0, most=LAST_TIME)


def _or_null(one: Check) -> Check:
    def check(value: Any) -> None:
        if value is not None:
            one(value)

    return check


def _mapping(**fields: Check) -> Check:
    """Checks an object: those of its fields that are known, if they are there."""

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise TypeError
        for name, field in fields.items():
            if name in value:
                field(value[name])

    return check


def _values(one: Check) -> Check:
    """Checks an object whose values are of one form."""

    def check(value: Any) -> None:
        for inner in value.values():
            one(inner)

    return check


def _list(one: Check, *required: str) -> Check:
    """Checks a list of objects of one form, with some required fields."""

    def check(value: Any) -> None:
        if not isinstance(value, list):
            raise TypeError
        for inner in value:
            one(inner)
            for name in required:
                inner[name]

    return check


def _data(value: Any) -> None:
    """Checks the facts about a dataset, or about several by name."""
    _mapping(samples=_or_null(_count))(value)
    for inner in value.values():
        if isinstance(inner, dict):
            _data(inner)


def _processes(value: Any) -> None:
    """Checks the times of the processes, which all have the same phases."""
    _list(_mapping(), "rank", "host", "device")(value)
    for row in value:
        if row.keys() != value[0].keys():
            raise ValueError
        for name in row.keys() - {"rank", "host", "device"}:
            parse_number(row[name])


def _trained_tokens(value: Any) -> None:
    """Checks the rows whose trained tokens are marked: each a list of texts, trained or not."""
    for row in value["examples"]:
        for text, is_trained in row:
            _text(text)
            _switch(is_trained)


_RUN: dict[str, Check] = {  # of the entry with which a run begins, or goes on
    "checkpoint": _text,
    "plan": _mapping(total_batch_size=_positive),
    "arguments": _mapping(metric_for_best_model=_or_null(_text), greater_is_better=_or_null(_switch)),
    "changed": _mapping(),
    "environment": _mapping(packages=_mapping(), device=_text),
    "data": _values(_data),
    "model": _mapping(**{"class": _text}, parameters=_count, trained_parameters=_count),
    "process": _mapping(),
    "recipe": _values(_text),
    "branch": _mapping(origins=_list(_mapping(checkpoint=_text, step=parse_step), "checkpoint", "step")),
    "levers": _mapping(rows=_list(_mapping(settings=_mapping()), "lever", "settings", "ratio", "proof", "result")),
}
# Fields that readers know, of all kinds and by kind, and those that an entry of a kind must have.
_COMMON: dict[str, Check] = {
    "kind": _text,
    "run": _text,
    "time": _time,
    "step": parse_step,
    "peak_memory_bytes": _count,
    "peak_gpu_bytes": _count,
}
_FIELDS: dict[str, dict[str, Check]] = {
    "start": _RUN,
    "resume": _RUN,
    "log": {"values": _mapping()},
    "evaluation": {"values": _mapping()},
    "save": {"best": _text},
    "end": {"best": _text},
    "failed": {"error": _text, "traceback": _text},
    "incident": {"text": _text},
    "warning": {"text": _text, "check": _text},
    "command": {"text": _text, "name": _text},
    "time": {"time_by_phase": _values(_count)},
    "processes": {"milliseconds_a_step": _processes},
    "what_is_trained": {"text": _list(_text), "tokens": _trained_tokens},
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "start": ("step",),
    "log": ("step", "values"),
    "evaluation": ("step", "values"),
    "save": ("step",),
    "resume": ("step",),
    "failed": ("step",),
    "incident": ("step", "text"),
    "warning": ("step", "text"),
    "command": ("step", "text", "name"),
    "time": ("time_by_phase",),
    "processes": ("milliseconds_a_step",),
    "what_is_trained": ("step", "text", "tokens"),
}
