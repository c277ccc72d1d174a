"""The two capabilities that see a whole trainer before its first step: the first look (`preflight`), and `speed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainwright.capability import Capability, Extension, Moment, Others, RunContext
from trainwright.capability_table import check_capability
from trainwright.config.fields import get_value

if TYPE_CHECKING:
    from trainwright.capabilities.recorded_values.value_comparison import ValuesReport
    from trainwright.preflight.check_registry import CheckReport
    from trainwright.preflight.prove import ProofReport

# Any: a trainer and its run, above this package.


def make_first_look(context: RunContext, others: Others) -> Extension | None:
    """Returns the first look at a batch and a step."""
    if not get_value(context.args, "preflight"):
        return None
    from trainwright.preflight.check_up import FirstLook

    return FirstLook(context.hooks, context.folder)


def make_speed(context: RunContext, others: Others) -> Extension | None:
    """Returns the measured settings of a run with `speed`."""
    if get_value(context.args, "speed") is None:
        return None
    from trainwright.preflight.speed import SpeedLevers

    return SpeedLevers(context.hooks)


def check(trainer: Any, run: Any, **how: Any) -> CheckReport:
    """Looks for likely problems; see `Trainer.check`."""
    from trainwright.preflight import check_up

    return check_up.full_check(trainer, **how)


def prove(trainer: Any, run: Any, *, num_steps: int) -> ProofReport:
    """Computes pairs of results that must be equal; see `Trainer.prove`."""
    from trainwright.preflight import prove

    return prove.prove(trainer, num_steps=num_steps)


def compare_with(trainer: Any, run: Any, other: Any, *, num_steps: int, tolerance: float | None) -> ValuesReport:
    """Finds the first value in which two trainings differ; see `Trainer.compare_with`."""
    check_capability("recorded_values", needed_by="compare_with()")
    from trainwright.preflight import compare_values

    return compare_values.compare_with(trainer, other, num_steps=num_steps, tolerance=tolerance)


METHODS: dict[str, Callable[..., Any]] = {"check": check, "prove": prove, "compare_with": compare_with}
FIRST_LOOK = Capability(make=make_first_look, moment=Moment.DIRECTORY, methods=METHODS)
SPEED = Capability(make=make_speed, moment=Moment.DIRECTORY)
