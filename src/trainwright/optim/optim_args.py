"""`optim_args`: from the text "name=value,name=value" to values, each by the converter that an optimizer has for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainwright.errors import ArgumentError, did_you_mean

UNSET: Any = object()
TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


class Option(NamedTuple):
    """One name of `optim_args`.

    Attributes:
        convert: from text to a value; a ValueError says what it should have been.
        default: what the optimizer is given when nobody says anything (text is converted too); UNSET: its own default.
    """

    convert: Callable[[str], Any]
    default: Any = UNSET


Options = Mapping[str, Option]


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def flag(text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise ValueError("true or false")
    return text.lower() in TRUE


def one_of(*words: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return convert


def dtype(text: str) -> Any:
    import torch

    value = getattr(torch, text, None)
    if not isinstance(value, torch.dtype):
        raise ValueError("a torch type such as float32 or bfloat16")
    return value


def parse_optim_args(text: str | None) -> dict[str, str]:
    """`"a=1, b=2"` as a dict of texts."""
    values = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item:
            continue
        name, sep, value = item.partition("=")
        if not sep:
            raise ArgumentError(f"optim_args={text!r}: {item!r} is no name=value. Write 'name=value,name=value'.")
        values[name] = value
    return values


def check_names(optimizer: str, given: Mapping[str, str], known: Options) -> None:
    """Raises ArgumentError for a name that the optimizer does not take."""
    for name in given:
        if name not in known:
            guess = did_you_mean(name, known, quoted=True)
            takes = ", ".join(sorted(known)) or "no options"
            raise ArgumentError(
                f"optim_args names {name!r}, which optim={optimizer!r} does not take; it takes {takes}.{guess}"
            )


def read(optimizer: str, given: Mapping[str, str], options: Options) -> dict[str, Any]:
    """Values of those `options` that were given or have a default."""
    values = {}
    for name, option in options.items():
        value = given.get(name, option.default)
        if value is not UNSET:
            try:
                values[name] = option.convert(value) if isinstance(value, str) else value
            except ValueError as error:
                raise ArgumentError(f"optim_args: {name}={value!r} of optim={optimizer!r} must be {error}.") from None
    return values
