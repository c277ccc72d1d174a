"""Where a run comes from, from the first start of a branch on; nothing is looked for in a run that begins afresh."""

from __future__ import annotations

from trainwright.capabilities.branch.origins import describe_origin, find_origin, origins_in
from trainwright.capability import Capability, Extension, Others, RunContext


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the ancestry of a branch, from its first start on."""
    run = context.run
    if run.resumed.checkpoint is None:
        return None
    if not run.resumed.begins_branch and not origins_in(run.resumed.checkpoint):
        return None
    from trainwright.capabilities.branch.extension import Ancestry

    return Ancestry(describe_origin(run.resumed.checkpoint) if run.resumed.begins_branch else None)


CAPABILITY = Capability(make=make, origin=find_origin)
