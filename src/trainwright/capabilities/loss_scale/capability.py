"""Skipped updates of fp16: none if a guard decides, which reads numbers of each step anyway, or nothing is skipped."""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.distributed.device import get_kind


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns what undoes the schedule's step for updates that were skipped on the device."""
    engine = context.engine
    if "guard" in others or not (engine.scales_loss and get_kind(engine.device).has_streams):
        return None
    from trainwright.capabilities.loss_scale.extension import SkippedUpdates

    return SkippedUpdates(engine)


CAPABILITY = Capability(make=make, needs=("guard",))
