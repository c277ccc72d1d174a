"""The ledger: visits and losses of single samples, and losses by source of a mixture.

A curriculum reads the ledger, so it is kept for one, though nothing of it is written.
"""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.config.fields import get_value
from trainwright.data.sources import NamedSources


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the ledger, or only the losses by source of a mixture."""
    dataset = context.hooks.train_dataset
    wanted = bool(get_value(context.args, "ledger"))
    is_mixture = isinstance(dataset, NamedSources)
    if dataset is None or not (wanted or is_mixture):
        return None
    from trainwright.capabilities.ledger.sample_losses import SampleLosses

    guard = others.get("guard")
    has_curriculum = is_mixture and getattr(dataset, "curriculum", None) is not None
    return SampleLosses(
        context.run,
        context.engine,
        settle_guard=do_nothing if guard is None else guard.settle,
        dataset=dataset,
        names=context.names,
        smoothing=context.args.label_smoothing_factor,
        keeps_ledger=wanted or has_curriculum,
        writes=context.writes and wanted,
        folder=context.folder,
    )


def do_nothing() -> None:
    """Stands in for a guard to settle."""


CAPABILITY = Capability(make=make, needs=("guard",))
