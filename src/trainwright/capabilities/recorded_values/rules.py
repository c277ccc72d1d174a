"""The rule of `record_values`: it names steps."""

from __future__ import annotations

from trainwright.config.coerce import parse_steps
from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, rule


@rule(Stage.CONSTRUCTION, "record_values")
def recorded_steps(args: Arguments) -> str | None:
    try:
        if (steps := get_value(args, "record_values")) is not None:
            parse_steps(steps)
    except ValueError as error:
        return f"record_values: {error}"
    return None
