"""Overrides: a copy of arguments with some other values, as a trial of a hyperparameter search trains with them."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from trainwright._types import python_number
from trainwright.config import rules
from trainwright.config.arguments import TrainingArguments, as_arguments
from trainwright.config.coerce import coerce
from trainwright.config.deprecated import OLD_NAMES, unknown_message
from trainwright.config.fields import ALIASES, RANGES, SETTINGS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

A = TypeVar("A", bound="DataclassInstance")


def with_overrides(args: A, values: Mapping[str, Any]) -> A:
    """Copies `args` with these values, coerced and checked (ArgumentError); fields settled with the trainer stay."""
    changed = copy.copy(args)
    for name, value in vars(args).items():
        if isinstance(value, (dict, list)):
            setattr(changed, name, copy.deepcopy(value))
    for name, value in _in_todays_names(args, values).items():
        if is_settled(name):
            continue
        setattr(changed, name, converted(args, name, value))
        if name in ALIASES:
            setattr(changed, ALIASES[name], getattr(changed, name))
    if isinstance(changed, TrainingArguments):  # arguments of transformers keep their own form
        rules.refuse([*coerce(as_arguments(changed)), *rules.violations(as_arguments(changed))])
    return changed


def find_name_problem(args: DataclassInstance, name: str) -> str | None:
    """Returns the reason why trials cannot name a field; None if they can."""
    names = [field.name for field in dataclasses.fields(args) if field.init]
    if name not in names:
        today = getattr(OLD_NAMES.get(name), "new", "")
        return find_name_problem(args, today) if today else unknown_message(name, names)
    return None


def is_settled(name: str) -> bool:
    """Returns whether a field is read when the Trainer is constructed, so that trials cannot differ in it."""
    return name in SETTINGS and not SETTINGS[name].searchable


def _in_todays_names(args: DataclassInstance, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with older names replaced by the fields that they mean."""
    names = {field.name for field in dataclasses.fields(args)}
    given = {name: value for name, value in values.items() if name in names}
    for name in values.keys() - names:
        given |= OLD_NAMES[name].meaning(values[name], {**vars(args), **given})
    return given


def find_value_problem(args: DataclassInstance, name: str, value: Any) -> str | None:
    """Returns the reason why the type of a field excludes a value; None if it does not."""
    try:
        converted(args, name, value)
    except ValueError as error:
        return str(error)
    return None


def converted(args: DataclassInstance, name: str, value: Any) -> Any:
    """A value as its field holds it (Python's numbers, whole for whole fields); ValueError for another kind."""
    value = python_number(value)
    kinds = set(re.findall(r"\w+", next((str(one.type) for one in dataclasses.fields(args) if one.name == name), "")))
    if value is None or isinstance(value, Enum) or not kinds & {"bool", "int", "float", "str"}:
        return value
    if isinstance(value, bool):
        if "bool" in kinds:
            return value
    elif isinstance(value, (int, float)):
        if kinds & {"int", "float"}:
            if not math.isfinite(value):
                raise ValueError(f"{name}={value!r} is not a finite number.")
            is_whole = "float" not in kinds or (name in RANGES and RANGES[name].whole)
            return int(value) if is_whole else float(value)  # a fraction too: spaces of Ray draw seeds from a range
        if "bool" in kinds and value in (0, 1):
            return bool(value)
    elif isinstance(value, str) == ("str" in kinds) or not kinds & {"bool", "int", "float"}:
        return value
    wanted = " or ".join(word for word in ("bool", "int", "float", "str") if word in kinds)
    raise ValueError(f"{name}={value!r} is of type {type(value).__name__}, and {name} takes {wanted}.")
