"""Commands to a run under way: names, values and limits. `inbox.py` carries them, `extension.py` acts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.errors import ArgumentError, did_you_mean
from trainwright.support.door import parse_number, shown

MAX_STEPS = 1_000_000
# Limits of a rate: products with it are neither infinite nor 0 in float32.
MIN_RATE = 1e-30
MAX_RATE = 1e6

# Name -> description of the value; None for commands without one.
COMMANDS: dict[str, str | None] = {
    "save": None,
    "evaluate": None,
    "stop": None,
    "lr": f"a learning rate above 0 ({MIN_RATE:g} to {MAX_RATE:g}), as 3e-5",
    "log": "a number of steps between two logs, as 5",
    "profile": "a number of steps to trace, as 20",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command, checked."""

    name: str
    value: float | None = None  # whole for `log` and `profile`

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name} {self.value:g}"


def parse_command(words: Sequence[object]) -> Command:
    """Parses a command from its words, as typed or as stored in a file.

    Args:
        words: the name, and the value of a command that takes one.

    Raises:
        ArgumentError: the command does not exist, or its value is invalid.
    """
    name, *values = words or ("",)
    if not isinstance(name, str) or name not in COMMANDS:
        near = did_you_mean(str(name), COMMANDS)
        raise ArgumentError(f"{name!r} is not a command.{near} Commands: {', '.join(COMMANDS)}.")
    wanted = COMMANDS[name]
    if wanted is None:
        if values:
            raise ArgumentError(f"{name} takes no value, but got {values[0]!r}.")
        return Command(name)
    if len(values) != 1:
        raise ArgumentError(f"{name} takes {wanted}.")
    is_whole = name != "lr"
    least, most = (1, MAX_STEPS) if is_whole else (MIN_RATE, MAX_RATE)
    try:
        number = _number(values[0], least=least, most=most)
    except ValueError:
        number = None
    if number is None or (is_whole and number != int(number)):
        given = values[0][:80] if isinstance(values[0], str) else shown(values[0])
        raise ArgumentError(f"{name} {given}: it takes {wanted}.")
    return Command(name, int(number) if is_whole else number)


def _number(value: object, *, least: float, most: float) -> float:
    """Returns a number, or the number in a text; ValueError if it is none or beyond the limits."""
    if isinstance(value, str) and re.fullmatch(r"[0-9.]+([eE][-+]?[0-9]+)?", value):
        value = float(value)
    return parse_number(value, least=least, most=most)
