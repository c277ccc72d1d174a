"""Kinds of older argument names, each with its translation. The names themselves are listed at the fields.

Each kind has `advice`; `reads`, the type of its value on a command line; `meaning`, which returns today's names and
values (or raises ValueError with the reason if there are none); `current`, the older name's value derived from today's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from trainwright.support.door import parse_json

Given = Mapping[str, Any]  # Any: the values of arguments, of all types


@dataclass
class Translation:
    """Keyword arguments in today's names, and the problems of untranslatable ones."""

    given: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    has_unknown: bool = False


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """The field itself, under another name."""

    new: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    back: Callable[[Any], Any] = lambda value: value
    note: str = ""
    reads: type = str
    yields: bool = False  # a value of the field that differs wins, and is no contradiction

    @property
    def advice(self) -> str:
        return f"use {self.new}{self.note}"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        return {} if value is None else {self.new: self.convert(value)}

    def current(self, args: Any) -> Any:
        return self.back(getattr(args, self.new))


@dataclass(frozen=True)
class Switch:
    """An older bool that is one value of a field today."""

    value: str
    also: tuple[Any, ...] = ()  # other ways to say the same
    new: str = ""
    reads: ClassVar[type] = bool

    @property
    def advice(self) -> str:
        return f"use {self.new}={self.value!r}"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        return {self.new: self.value} if value and given.get(self.new) not in self.also else {}

    def current(self, args: Any) -> Any:
        return getattr(args, self.new) in (self.value, *self.also)


@dataclass(frozen=True)
class DictKey:
    """An older argument that is one entry of a dict-valued field today."""

    key: str
    unset: tuple[Any, ...] = (None,)
    reads: type = str
    new: str = ""

    @property
    def advice(self) -> str:
        return f"use {self.new}={{{self.key!r}: ...}}"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        if value in self.unset:
            return {}
        rest = given.get(self.new) or {}
        if isinstance(rest, str) and rest.startswith("{"):
            rest = parse_json(rest)
        rest = read_entries(rest)
        if not isinstance(rest, Mapping):
            raise ValueError(f"it cannot be added to {self.new}={rest!r}; write it there, under {self.key!r}")
        return {self.new: {**rest, self.key: value}}

    def current(self, args: Any) -> Any:
        return read_entries(getattr(args, self.new) or {}).get(self.key, self.unset[-1])


@dataclass(frozen=True)
class Item:
    """An older bool that is one item of a list-valued field today."""

    item: str
    new: str = ""
    reads: ClassVar[type] = bool

    @property
    def advice(self) -> str:
        return f"use {self.new}=[{self.item!r}]"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        rest = given.get(self.new) or []
        items = rest.split() if isinstance(rest, str) else list(rest)
        return {self.new: [*items, self.item]} if value and self.item not in items else {}

    def current(self, args: Any) -> Any:
        return self.item in getattr(args, self.new)


@dataclass(frozen=True)
class Organization:
    """The owner's part of hub_model_id; the name comes from there or from output_dir."""

    new: str = ""
    advice: ClassVar[str] = "use hub_model_id='owner/name'"
    reads: ClassVar[type] = str

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        if value is None:
            return {}
        name = given.get("hub_model_id") or given.get("push_to_hub_model_id")
        name = name or Path(given.get("output_dir") or "trainer_output").name
        return {"hub_model_id": name if "/" in name else f"{value}/{name}"}

    def current(self, args: Any) -> Any:
        owner, has_owner, _ = (args.hub_model_id or "").partition("/")
        return owner if has_owner else None


NameOfField = Renamed | Switch | DictKey | Item | Organization  # `new` is filled in where names are collected


@dataclass(frozen=True)
class Refused:
    """Has no meaning today. Values that asked for nothing are accepted."""

    harmless: tuple[Any, ...]
    reason: str
    instead: str
    reads: type = str

    @property
    def advice(self) -> str:
        return f"leave it out ({self.reason}; {self.instead})"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        if value not in (None, *self.harmless):
            raise ValueError(f"{self.reason}. Instead: {self.instead}")
        return {}

    def current(self, args: Any) -> Any:
        return self.harmless[0]


@dataclass(frozen=True)
class Accepted:
    """An older name that is accepted with any value, because it now describes the default behaviour."""

    reason: str
    reads: ClassVar[type] = bool

    @property
    def advice(self) -> str:
        return f"leave it out ({self.reason})"

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        return {}

    def current(self, args: Any) -> Any:
        return False


@dataclass(frozen=True)
class Honoured:
    """A name that transformers has removed, but that is still a field here."""

    advice: ClassVar[str] = "it is a field here"
    reads: ClassVar[type] = str

    def meaning(self, value: Any, given: Given) -> dict[str, Any]:
        return {}

    def current(self, args: Any) -> Any:
        raise AssertionError("fields are read by their own names")


OldName = NameOfField | Refused | Accepted | Honoured


def read_entries(value: Any) -> Any:
    """The dict of a dict-valued field that may hold an object."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def ratio_to_steps(ratio: float) -> float:
    """A ratio of all steps, as warmup_steps takes it: there, 1 would be one step."""
    if not 0 <= ratio <= 1:
        raise ValueError("it is a share of all steps between 0 and 1; write a number of steps as warmup_steps")
    return min(ratio, math.nextafter(1.0, 0.0))


def steps_to_ratio(warmup_steps: float) -> float:
    """The ratio that `warmup_steps` is; 0 if it is a number of steps, which wins over a ratio."""
    return warmup_steps if warmup_steps < 1 else 0.0


APEX = "NVIDIA's Apex is not used; torch has mixed precision of its own"
