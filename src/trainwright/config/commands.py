"""Commands to a run under way: names, values and limits. `support/inbox` carries them, `extensions/control` acts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.errors import ArgumentError, did_you_mean

MAX_STEPS = 1_000_000

# Name -> description of the value; None for commands without one.
COMMANDS: dict[str, str | None] = {
    "save": None,
    "evaluate": None,
    "stop": None,
    "lr": "a learning rate above 0, as 3e-5",
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
    number = _number(values[0])
    is_whole = name != "lr"
    if number is None or not 0 < number <= MAX_STEPS or (is_whole and number != int(number)):
        raise ArgumentError(f"{name} {values[0]}: it takes {wanted}.")
    return Command(name, int(number) if is_whole else number)


def _number(value: object) -> float | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9.]+([eE][-+]?[0-9]+)?", value):
        try:
            return float(value)
        except ValueError:
            return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None
