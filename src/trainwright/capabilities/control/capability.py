"""Commands to a run under way (`live_control`)."""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Others, RunContext
from trainwright.config.fields import get_value


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the receiver of commands, if a run takes some or repeats them."""
    wanted = get_value(context.args, "live_control")
    if not wanted:
        return None
    from trainwright.capabilities.control.extension import LiveControl

    return LiveControl(
        context.folder,
        context.engine,
        context.args,
        callbacks=context.hooks.callback_handler,
        can_evaluate=context.hooks.eval_dataset is not None,
        repeats=wanted if isinstance(wanted, str) else None,
    )


CAPABILITY = Capability(make=make)
