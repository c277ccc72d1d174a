"""The meter of updates that round to nothing; none for weights in float32."""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.config.fields import get_value


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the meter of a run that updates weights of 16 bits in place."""
    from trainwright.capabilities.lost_updates.extension import LostUpdates, is_low

    optimizer = context.run.setup.optimizer
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if context.engine.updates_in_clip or not any(map(is_low, weights)):
        return None
    if get_value(context.args, "reproduce") is not None:  # its logs have no such entry
        return None
    return LostUpdates(context.args)


CAPABILITY = Capability(make=make)
