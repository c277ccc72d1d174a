"""A curriculum: the weights of samples follow their losses in the ledger."""

from __future__ import annotations

from trainwright.capabilities.curriculum.data_handler import find_curriculum
from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.config.fields import value_if_known


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the extension that moves a curriculum on; None if the data has none."""
    run = context.run
    dataset = context.hooks.train_dataset
    if find_curriculum(dataset) is None:
        return None
    from trainwright.capabilities.curriculum.extension import CurriculumRun
    from trainwright.capabilities.ledger.sample_losses import SampleLosses

    samples = others["ledger"]
    assert isinstance(samples, SampleLosses)
    return CurriculumRun(
        dataset,
        run.loader,
        samples,
        context.engine,
        plan=run.plan,
        keeps_ledger=bool(value_if_known(context.args, "ledger")),
        writes=context.writes,
    )


CAPABILITY = Capability(make=make, needs=("ledger",))
