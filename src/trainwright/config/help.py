"""Arguments for people: their groups, what differs from the defaults, and the text of `print(args)`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from trainwright.config.coerce import coerce
from trainwright.config.fields import ALIASES, GROUPS, defaults_of
from trainwright.config.protocol import Arguments
from trainwright.config.serialization import plain, stand_in

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def grouped(kind: type) -> dict[str, list[Field[Any]]]:
    """The fields of a dataclass by the title of the group that brought them; a subclass' own under its name."""
    by_name = {field.name: field for field in fields(kind) if field.init}
    groups: dict[str, list[Field[Any]]] = {}
    for owner in reversed(kind.__mro__):
        for name in inspect.get_annotations(owner):
            if name in by_name:
                groups.setdefault(vars(owner).get("group", owner.__name__), []).append(by_name.pop(name))
    return groups


def differing(args: DataclassInstance) -> dict[str, Any]:
    """What is set to something else than by default, as plain values; tokens are marked, not shown.

    Serves transformers' arguments too. An alias that repeats its new name is left out.
    """
    defaults = _settled_defaults(type(args))
    result = {}
    for field in fields(args):
        value, default = getattr(args, field.name), defaults.get(field.name, MISSING)
        if value is default:  # nearly all of them
            continue
        repeats = field.name in ALIASES and value == getattr(args, ALIASES[field.name])
        same = default is not MISSING and _comparable(value) == _comparable(default)
        if field.init and not repeats and not same:
            result[field.name] = stand_in(field.name, plain(value))
    return result


def describe(args: DataclassInstance, *, plan: Sequence[str] = ()) -> str:
    """Text of all arguments: what they come to, those that differ from the defaults, then everything, by group."""
    lines = [f"{type(args).__name__}(", *(f"  # {line}" for line in plan), "", "  # differs from the defaults"]
    lines += [f"  {name}={value!r}," for name, value in differing(args).items()] or ["  # (nothing)"]
    for title, members in grouped(type(args)).items():
        lines += ["", f"  # {title}"]
        for field in members:
            value = getattr(args, field.name)
            shown = value if value is None else stand_in(field.name, plain(value))
            lines.append(f"  {field.name}={shown!r},")
    return "\n".join([*lines, ")"])


def _settled_defaults(kind: type) -> dict[str, Any]:
    """Defaults in the form that construction brings them to (None -> "trainer_output", ...)."""
    defaults: dict[str, Any] = {}
    for group in GROUPS:
        defaults |= defaults_of(group)
    namespace = SimpleNamespace(**{**defaults, **defaults_of(kind)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coerce(cast(Arguments, namespace))
    return vars(namespace)


def _comparable(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, dict) and "even_batches" in value:  # the original's drops this key from its own instances
        return {key: inner for key, inner in value.items() if key != "use_configured_state"}
    return value
