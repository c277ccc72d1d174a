"""Checkpoint items: the user's objects whose state is saved and restored with a run."""

from __future__ import annotations

from trainwright.capabilities.checkpoint_items.extension import CheckpointItems
from trainwright.capability import Capability, Others, RunContext
from trainwright.checkpoint import training_state


def make(context: RunContext, others: Others) -> CheckpointItems:
    """Returns the items of a run, even if there are none: a checkpoint may have some."""
    setup = context.run.setup
    may_be_dropped = context.run.plan.micro_batches > 1 or setup.prepares_windows
    may_be_retried = setup.random_states is not None or setup.smaller_batches is not None
    return CheckpointItems(
        training_state.read_items(context.hooks),
        context.engine,
        writes=context.writes,
        is_rewindable=may_be_dropped or may_be_retried,
    )


CAPABILITY = Capability(make=make)
