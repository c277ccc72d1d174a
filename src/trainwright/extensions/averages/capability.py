"""An average of the weights (`average`)."""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.config import resolve


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the average of a run that keeps one."""
    run = context.run
    plan = resolve.average(context.args)
    if plan is None:
        return None
    from trainwright.extensions.averages.extension import WeightAverages

    return WeightAverages(
        plan,
        run.setup.model,
        context.engine,
        num_steps=None if run.plan.has_open_end else run.plan.max_steps,
        is_late=any(one.refuses_late for one in others.values()),
        writes=context.writes,
    )


CAPABILITY = Capability(make=make, needs=("guard", "loss_scale"))
