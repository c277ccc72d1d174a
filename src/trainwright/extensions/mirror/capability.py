"""The mirror: copies of the checkpoints at `checkpoint_mirror`, a URL."""

from __future__ import annotations

from trainwright.capability import Capability, Extension, Moment, Others, RunContext
from trainwright.config import resolve
from trainwright.config.fields import value_if_known


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the mirror of a run that may save."""
    args = context.args
    engine = context.engine
    mirror = resolve.mirror(args, context.folder)
    if mirror is None or not resolve.checkpoint(args).may_save:
        return None
    from trainwright.extensions.mirror.extension import Place, RunMirror

    return RunMirror(
        mirror,
        context.folder,
        Place(
            args.process_index,
            args.local_process_index,
            engine.agree,
            engine.gather_objects,
            lambda: engine.writes_parts,
        ),
        wait_s=value_if_known(args, "output_dir_wait_s") or 0.0,
        overwrites=getattr(args, "overwrite_output_dir", None),
    )


CAPABILITY = Capability(make=make, moment=Moment.DIRECTORY)
