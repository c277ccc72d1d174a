"""Slow processes, for which the others wait; none in a run of one process."""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Others, RunContext


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the extension that compares the processes."""
    if context.engine.num_replicas == 1:
        return None
    from trainwright.capabilities.slow_ranks.extension import SlowRanks

    return SlowRanks(context.engine, context.folder)


CAPABILITY = Capability(make=make)
