"""What a run trains, shown before step 1; only for language models, and not without `preflight`."""

from __future__ import annotations

from trainwright.capabilities.what_is_trained.checks import CHECKS, make_section
from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.config.fields import get_value


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the extension that shows what the first window trains."""
    if not get_value(context.args, "preflight"):
        return None
    from trainwright.capabilities.what_is_trained.extension import ShowWhatIsTrained

    return ShowWhatIsTrained(context)


CAPABILITY = Capability(make=make, checks=CHECKS, sections=(make_section,))
