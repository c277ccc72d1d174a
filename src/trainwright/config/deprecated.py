"""Older names of arguments: collected from the fields, translated in a call, read and assigned as attributes."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from trainwright.config.aliases import (
    APEX,
    Accepted,
    DictKey,
    Given,
    Honoured,
    Item,
    OldName,
    Organization,
    Refused,
    Switch,
    Translation,
    read_entries,
)
from trainwright.config.coerce import coerce
from trainwright.config.fields import SETTINGS, OlderFields
from trainwright.config.vocabulary import hint_for_argument
from trainwright.errors import ArgumentError, LegacyNameWarning

TAKING_IN = (DictKey, Item, Organization)  # translated last, because they add to the values of the others

_SHARDED = "FairScale is not used; torch shards models itself"
_NATIVE = ("auto", "cuda_amp", "cpu_amp", "amp")

OF_NO_FIELD: dict[str, OldName] = {
    "jit_mode_eval": Refused((False,), "evaluation does not trace with TorchScript", "torch_compile=True", bool),
    "use_ipex": Refused((False,), "IPEX is not used; torch itself is fast on Intel's devices", "bf16=True", bool),
    "fp16_opt_level": Refused(("O1", ""), APEX, "fp16=True or bf16=True"),
    "half_precision_backend": Refused(_NATIVE, APEX, "fp16=True or bf16=True"),
    "fp16_backend": Refused(_NATIVE, APEX, "fp16=True or bf16=True"),
    "sharded_ddp": Refused((False, "", []), _SHARDED, "fsdp=True"),
    "mp_parameters": Refused(("",), "SageMaker's model parallelism is not used", "fsdp=True or deepspeed"),
    "use_mps_device": Accepted("MPS is found by itself; use_cpu=True turns it off"),
}
OLD_NAMES: dict[str, OldName] = {
    **{old: replace(kind, new=name) for name, one in SETTINGS.items() for old, kind in one.formerly.items()},
    **OF_NO_FIELD,
    **{name: Honoured() for name in OlderFields.settings},
}

# How a command line reads the older names; the others are text.
OLD_FLAGS = frozenset(name for name, row in OLD_NAMES.items() if row.reads is bool)
OLD_NUMBERS = {name: row.reads for name, row in OLD_NAMES.items() if row.reads in (int, float)}


def translate(given: Given, defaults: Given) -> Translation:
    """Replace older names in `given`; each warns once. `defaults`: all names that are fields, with their defaults.

    A field given at its default does not contradict its older name: parsers and saved configurations list
    every field.
    """
    result = Translation({name: value for name, value in given.items() if name in defaults})
    unknown = [name for name in given if name not in defaults and name not in OLD_NAMES]
    result.problems += [unknown_message(name, [*defaults, *OLD_NAMES]) for name in unknown]
    result.has_unknown = bool(unknown)
    older = [name for name in given if name in OLD_NAMES and name not in defaults]
    for name in sorted(older, key=lambda name: isinstance(OLD_NAMES[name], TAKING_IN)):
        problem = _translate_one(name, given, result.given, defaults)
        if problem is None:
            warnings.warn(f"{name} is an older name: {OLD_NAMES[name].advice}.", LegacyNameWarning, stacklevel=3)
        else:
            result.problems.append(problem)
    return result


def _translate_one(name: str, original: Given, given: dict[str, Any], defaults: Given) -> str | None:
    """Writes the meaning of one older name into `given`, or returns why it has none."""
    row = OLD_NAMES[name]
    value = original[name]
    try:
        meaning = row.meaning(value, {**original, **given})
    except ValueError as reason:
        return f"{name}={value!r} is refused: {reason}."
    for new, translated in meaning.items():
        default = defaults.get(new)
        present = given.get(new, default)
        if isinstance(row, TAKING_IN) or present in (default, translated):
            given[new] = translated
        elif translated != default and not getattr(row, "yields", False):
            shown = "" if new.endswith("_token") else f" ({translated!r} and {present!r})"
            return f"{name} and {new} are given and differ{shown}. Keep {new}, its name today."
    return None


def unknown_message(name: str, known: Collection[str]) -> str:
    """Returns the message for an unknown argument, with a suggestion."""
    return f"{name} is not an argument.{hint_for_argument(name, known)}"


def read_older_name(args: Any, name: str) -> Any:
    """Returns the value of an older name, from the current ones; AttributeError for an unknown name."""
    if name not in OLD_NAMES:
        raise AttributeError(f"{type(args).__name__!r} object has no attribute {name!r}")
    return OLD_NAMES[name].current(args)


def assign_older_name(args: Any, name: str, value: Any) -> None:
    """Assigns the meaning of an older name to existing arguments, coerced; ArgumentError if it has no meaning."""
    meaning = _meaning_for(args, name, value)
    if meaning:
        warnings.warn(f"{name} is an older name: {OLD_NAMES[name].advice}.", LegacyNameWarning, stacklevel=3)
        for new, translated in meaning.items():
            setattr(args, new, translated)
        if problems := coerce(args):
            raise ArgumentError("\n".join(problems))


def _meaning_for(args: Any, name: str, value: Any) -> dict[str, Any]:
    """Returns the meaning of an older name for existing arguments; it may undo a previously set one."""
    row = OLD_NAMES[name]
    try:
        meaning = row.meaning(value, vars(args))
    except ValueError as reason:
        raise ArgumentError(f"{name}={value!r} is refused: {reason}.") from None
    if meaning or row.current(args) == value:
        return meaning
    if isinstance(row, Switch):
        return {row.new: SETTINGS[row.new].default}
    if isinstance(row, Item):
        return {row.new: [item for item in getattr(args, row.new) if item != row.item]}
    return {row.new: {**read_entries(getattr(args, row.new) or {}), row.key: value}} if isinstance(row, DictKey) else {}
