"""Recorded metrics: numbers of `Trainer.record` for the next log."""

from __future__ import annotations

from trainwright.capabilities.recorded_metrics.extension import RecordedNumbers
from trainwright.capability import Capability, Others, RunContext


def make(context: RunContext, others: Others) -> RecordedNumbers:
    """Returns the numbers of a run."""
    return RecordedNumbers(context.run.progress, writes=context.writes, is_first=context.engine.replica == 0)


CAPABILITY = Capability(make=make)
