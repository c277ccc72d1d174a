"""An average of the weights (`average`)."""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.config.fields import get_value


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the average of a run that keeps one."""
    run = context.run
    wanted = get_value(context.args, "average")
    if wanted is None:
        return None
    from trainwright.capabilities.averages.extension import WeightAverages
    from trainwright.capabilities.averages.plan import parse_average

    return WeightAverages(
        parse_average(wanted),
        run.setup.model,
        context.engine,
        num_steps=None if run.plan.has_open_end else run.plan.max_steps,
        is_late=any(one.refuses_late for one in others.values()),
        writes=context.writes,
    )


CAPABILITY = Capability(make=make, needs=("guard", "loss_scale"))
