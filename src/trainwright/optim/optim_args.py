"""Parser of `optim_args`: the text "name=value,name=value" as values, each by its optimizer's converter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainwright.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

UNSET = object()
TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


class Option(NamedTuple):
    """One name of `optim_args`."""

    convert: Callable[[str], object]  # converts text to a value; the message of its ValueError is the expected kind
    # value for the optimizer where none is given (text is converted too); UNSET for the optimizer's own
    default: object = UNSET


Options = Mapping[str, Option]


def whole(text: str) -> int:
    """Converts a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def number(text: str) -> float:
    """Converts a number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def flag(text: str) -> bool:
    """Converts true or false."""
    if text.lower() not in TRUE + FALSE:
        raise ValueError("true or false")
    return text.lower() in TRUE


def one_of(*words: str) -> Callable[[str], str]:
    """Returns a converter that takes only these words."""

    def convert(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return convert


def dtype(text: str) -> torch.dtype:
    """Converts the name of a torch type."""
    import torch

    value = getattr(torch, text, None)
    if not isinstance(value, torch.dtype):
        raise ValueError("a torch type such as float32 or bfloat16")
    return value


def parse_optim_args(text: str | None) -> dict[str, str]:
    """Splits `"a=1, b=2"` into a dict of texts."""
    values = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item:
            continue
        name, sep, value = item.partition("=")
        if not sep:
            raise ArgumentError(f"optim_args={text!r}: {item!r} is no name=value. Write 'name=value,name=value'.")
        values[name] = value
    return values


def warn_of_unknown_names(optimizer: str, given: Mapping[str, str], known: Options) -> None:
    """Warns of names that the optimizer does not take; transformers ignores them without a word."""
    for name in given:
        if name not in known:
            guess = did_you_mean(name, known, quoted=True)
            takes = ", ".join(sorted(known)) or "no options"
            logger.warning(
                "optim_args names %r, which has no effect: optim=%r takes %s.%s", name, optimizer, takes, guess
            )


def read(optimizer: str, given: Mapping[str, str], options: Options) -> dict[str, Any]:  # arguments of a class
    """Returns the values of those `options` that were given or have a default."""
    values = {}
    for name, option in options.items():
        value = given.get(name, option.default)
        if value is not UNSET:
            try:
                values[name] = option.convert(value) if isinstance(value, str) else value
            except ValueError as error:
                raise ArgumentError(f"optim_args: {name}={value!r} of optim={optimizer!r} must be {error}.") from None
    return values
