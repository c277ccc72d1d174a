"""The two capabilities that see a whole trainer before its first step: the first look (`preflight`), and `speed`."""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Moment, Others, RunContext
from trainwright.config.fields import value_of


def make_first_look(context: RunContext, others: Others) -> Extension | None:
    """Returns the first look at a batch and a step."""
    if not value_of(context.args, "preflight"):
        return None
    from trainwright.preflight.check_up import FirstLook

    return FirstLook(context.hooks, context.folder)


def make_speed(context: RunContext, others: Others) -> Extension | None:
    """Returns the measured settings of a run with `speed`."""
    if value_of(context.args, "speed") is None:
        return None
    from trainwright.preflight.speed import SpeedLevers

    return SpeedLevers(context.hooks)


FIRST_LOOK = Capability(make=make_first_look, moment=Moment.DIRECTORY)
SPEED = Capability(make=make_speed, moment=Moment.DIRECTORY)
