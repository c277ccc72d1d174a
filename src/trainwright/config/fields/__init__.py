"""The fields of the arguments, each declared once with every fact about it, and functions that look up these facts.

There is one dataclass per group, and TrainingArguments inherits from all of them. Names, defaults and order are as in
transformers 5.23, which also takes arguments by position; our own groups follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from inspect import get_annotations
from typing import Any

from trainwright.capability_table import BATCHING_FIELDS
from trainwright.config.fields.our_fields import OurFields
from trainwright.config.fields.own_fields import GenerationFields, OlderFields
from trainwright.config.fields.shared_fields import SharedFields
from trainwright.config.setting import FieldGroup, Range, Setting, Syntax

__all__ = [
    "ALIASES",
    "CHOICES",
    "GROUPS",
    "POSITIONS",
    "RANGES",
    "SETTINGS",
    "WITH_GENERATION",
    "GenerationFields",
    "OlderFields",
    "OurFields",
    "SharedFields",
    "assign",
    "batch_formers",
    "changed_fields",
    "find_invalid_values",
    "get_value",
    "has_other_meaning",
    "names_with",
    "read_defaults",
    "redeclared_fields",
    "shadowed_fields",
    "value_if_known",
]


BY_POSITION: tuple[type[FieldGroup], ...] = SharedFields.__bases__[::-1]
GROUPS: tuple[type[FieldGroup], ...] = (*BY_POSITION, OlderFields, OurFields)
WITH_GENERATION: tuple[type[FieldGroup], ...] = (*GROUPS, GenerationFields)

POSITIONS = tuple(name for group in BY_POSITION for name in group.settings)
SETTINGS: Mapping[str, Setting] = {name: one for group in WITH_GENERATION for name, one in group.settings.items()}
RANGES: Mapping[str, Range] = {name: one.limits for name, one in SETTINGS.items() if one.limits is not None}
CHOICES: Mapping[str, tuple[object, ...]] = {name: one.allowed for name, one in SETTINGS.items() if one.choices}
ALIASES: Mapping[str, str] = {name: one.alias_of for name, one in SETTINGS.items() if one.alias_of is not None}
OLDER_NAMES: Mapping[str, str] = {name: older for older, name in ALIASES.items()}
_DEFAULTS = tuple((name, one.default) for name, one in SETTINGS.items())


def names_with(syntax: Syntax) -> tuple[str, ...]:
    """The fields that take this short form."""
    return tuple(name for name, one in SETTINGS.items() if syntax in one.syntax)


def read_defaults(kind: type) -> dict[str, Any]:  # Any: the values of any dataclass
    """The default of each field of a dataclass that has one."""
    defaults = {}
    for field in fields(kind):
        if field.init and field.default is not MISSING:
            defaults[field.name] = field.default
        elif field.init and field.default_factory is not MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def get_value(args: object, name: str) -> Any:  # Any: the value of any field
    """The value of a field that the class of `args` may lack, as transformers' does.

    Then it is that of the field's older name, which an older transformers has, or the field's default.

    So it is, too, where the class declares a field of this name itself, as TRL's SFTConfig has a `packing` that is True
    or False and that its own trainer carries out: what a subclass declares is the subclass's.
    """
    setting = SETTINGS[name]
    if has_other_meaning(args, name):
        return setting.default
    value = getattr(args, name, MISSING)
    if value is MISSING:
        value = getattr(args, OLDER_NAMES.get(name, name), setting.default)
    return value


def value_if_known(args: object, name: str) -> Any:  # Any: the value of any field
    """The value of a field of another capability, which may not be there; then None."""
    return get_value(args, name) if name in SETTINGS else None


def has_other_meaning(args: object, name: str) -> bool:
    """Returns whether the class of `args` declares this field of ours itself, so that it may mean something else."""
    kind: type = type(args)
    return name in redeclared_fields(kind)


@lru_cache(maxsize=8)
def redeclared_fields(kind: type) -> tuple[str, ...]:
    """Returns the names of our fields that a subclass of the arguments declares: as a field, a property or a value."""
    ours = OurFields.__dataclass_fields__
    theirs = getattr(kind, "__dataclass_fields__", {})
    above = {name for owner in _find_user_subclasses(kind) for name in vars(owner)}
    return tuple(name for name in ours if name in above or theirs.get(name, ours[name]) is not ours[name])


@lru_cache(maxsize=8)
def shadowed_fields(kind: type) -> frozenset[str]:
    """Returns the names of our fields that a subclass uses for a property, a method or a value that is no field."""
    ours = OurFields.__dataclass_fields__
    shadowed: set[str] = set()
    for owner in _find_user_subclasses(kind):
        fields_of_owner = get_annotations(owner) if "__dataclass_fields__" in vars(owner) else {}
        shadowed |= (ours.keys() & vars(owner).keys()) - fields_of_owner.keys()
    return frozenset(shadowed)


def _find_user_subclasses(kind: type) -> Iterator[type]:
    """Yields the classes that a user or a library has put above or beside our groups of fields."""
    groups = {*WITH_GENERATION, object}
    for owner in kind.__mro__:
        if owner not in groups and not owner.__module__.startswith("trainwright.config."):
            yield owner


def assign(args: object, settings: Mapping[str, Any]) -> None:
    """Sets fields of arguments; names that their class lacks, or declares itself, stay as they are."""
    for name, value in settings.items():
        if hasattr(args, name) and not has_other_meaning(args, name):
            setattr(args, name, value)


ASKED_FOR = "_asked_for"  # attribute of arguments: names of the fields that the user chose


def changed_fields(args: object) -> set[str]:
    """Returns the fields with other values than their defaults, and the fields that `args` lacks."""
    changed = set()
    for name, default in _DEFAULTS:
        value = getattr(args, name, MISSING)
        if value is not default and (type(value) is not type(default) or value != default):
            changed.add(name)
    return changed


def was_asked_for(args: object, name: str) -> bool:
    """Returns whether the user chose the value of a field, in a call of the constructor or of a setter.

    Others may be a library's: a subclass sets some in `__post_init__`, and SetFit assigns its own defaults. Arguments
    from transformers do not keep it, and every value of theirs counts as chosen.
    """
    asked: set[str] | None = vars(args).get(ASKED_FOR)
    return asked is None or name in asked


def batching_fields(args: object) -> list[str]:
    """The settings that are on and form batches by length themselves."""
    return [name for name in BATCHING_FIELDS if get_value(args, name) is not None]


def find_invalid_values(args: object) -> Iterator[tuple[str, str]]:
    """Fields with invalid values, each with a message. Fields that `args` lacks are skipped."""
    for name, limits in RANGES.items():
        if not hasattr(args, name) or has_other_meaning(args, name):
            continue
        value = getattr(args, name)
        if isinstance(value, bool) and name in OurFields.__dataclass_fields__:
            # Python takes True for 1; the original does too, for fields of its own.
            yield name, f"{name}={value} is not a number.{' None turns it off.' if limits.optional else ''}"
        elif problem := limits.problem(name, value):
            yield name, problem
    for name, allowed in CHOICES.items():
        if has_other_meaning(args, name):
            continue
        value = getattr(args, name, allowed[0])
        if getattr(value, "value", value) not in allowed:
            words = ", ".join(repr(word) for word in allowed if word is not None)
            also = ", or None" if None in allowed else ""
            yield name, f"{name}={value!r} is not allowed. Allowed: {words}{also}."
