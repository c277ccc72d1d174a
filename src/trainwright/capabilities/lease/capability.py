"""The lease of an output directory: taken before a run reads or writes there."""

from __future__ import annotations

from trainwright.capabilities.lease.extension import DirectoryLease
from trainwright.capability import Capability, Moment, Others, RunContext
from trainwright.config import resolve
from trainwright.config.fields import get_value


def make(context: RunContext, others: Others) -> DirectoryLease:
    """Returns the lease of the output directory; a run that never saves only looks who has it."""
    may_save = resolve.checkpoint(context.args).may_save
    wait_s = get_value(context.args, "output_dir_wait_s")
    return DirectoryLease(context.folder, context.engine.agree, may_save=may_save, wait_s=wait_s)


CAPABILITY = Capability(make=make, moment=Moment.DIRECTORY)
