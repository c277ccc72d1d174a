"""Constructor of arguments: how a call reaches the fields, by position, by name, or by an older name.

The `__init__` of a dataclass is generated, in each subclass anew, after the class body has run. So it is wrapped when
the class makes its first instance (`TrainingArguments.__new__`). An `__init__` that somebody wrote by hand is left
alone; what it passes on to ours is translated there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from trainwright.config.aliases import Translation
from trainwright.config.fields import POSITIONS, OlderFields, OurFields, defaults_of
from trainwright.errors import ArgumentError, UnknownArgumentError

PENDING = "_translation"  # on an instance under construction only: what its names left to complain about


class FieldSignature:
    """For `__signature__` of a class: the parameters of its `__init__`, which a `__new__` would hide from inspect."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        of_init = inspect.signature(owner.__init__)  # type: ignore[misc]  # of the class itself, not of a subclass
        return of_init.replace(parameters=list(of_init.parameters.values())[1:])


def accept_old_names(kind: type) -> None:
    """Wrap the generated `__init__` of `kind`, once. Does nothing to one written by hand, or inherited."""
    init = vars(kind).get("__init__")
    if init is not None and not hasattr(init, "accepts_old_names") and _is_generated(kind, init):
        kind.__init__ = _accepting(kind, init)  # type: ignore[misc]  # replacing it is the purpose


def refuse(problems: Sequence[str], *, kind: type[ArgumentError] = ArgumentError) -> None:
    """Raise one error that tells all problems; none: do nothing."""
    if problems:
        listed = "\n".join([f"{len(problems)} problems with the arguments:", *(f"- {p}" for p in problems)])
        error = kind(problems[0] if len(problems) == 1 else listed)
        error.problems = tuple(problems)
        raise error


def _is_generated(kind: type, init: Callable[..., None]) -> bool:
    """A dataclass' own `__init__` takes exactly the fields."""
    if "__dataclass_fields__" not in vars(kind):
        return False
    names = set(inspect.signature(init).parameters) - {"self"}
    return names == {field.name for field in fields(kind) if field.init}


def _accepting(kind: type, init: Callable[..., None]) -> Callable[..., None]:
    names = [field.name for field in fields(kind) if field.init]
    by_name_only = {*OlderFields.settings, *OurFields.settings}
    positions = [*POSITIONS, *(name for name in names if name not in POSITIONS and name not in by_name_only)]

    @functools.wraps(init)
    def accept(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(positions):
            raise TypeError(f"{kind.__name__} takes {len(positions)} arguments by position, {len(args)} were given")
        if twice := sorted(set(positions[: len(args)]) & set(kwargs)):
            raise TypeError(f"{kind.__name__} got {', '.join(twice)} by position and by name")
        known = dict.fromkeys(names) | defaults_of(kind)
        given = {**dict(zip(positions, args, strict=False)), **kwargs}
        translation = Translation(given)
        if not given.keys() <= known.keys():
            from trainwright.config.deprecated import translate

            translation = translate(given, known)
        vars(self)[PENDING] = translation
        try:
            init(self, **translation.given)
            finish(self, [])  # for a subclass whose __post_init__ does not call ours
        finally:
            vars(self).pop(PENDING, None)

    accept.accepts_old_names = True  # type: ignore[attr-defined]
    return accept


def finish(instance: Any, problems: Sequence[str]) -> None:
    """Raise what the names of the call and `problems` amount to."""
    translation = vars(instance).pop(PENDING, None) or Translation({})
    kind = UnknownArgumentError if translation.has_unknown else ArgumentError
    refuse([*translation.problems, *problems], kind=kind)
