"""How rows are packed, for the plan of a run and the lines about it."""

from __future__ import annotations

from trainwright._types import counted
from trainwright.config.fields import get_value
from trainwright.config.plans import Batching
from trainwright.config.protocol import Arguments


def plan_batches(args: Arguments) -> Batching | None:
    """Returns the rows of the arguments; None if they pack none."""
    packing = get_value(args, "packing")
    if packing is None:
        return None
    length = get_value(args, "packing_length")
    rows = counted(args.per_device_train_batch_size, "row")
    splits_long = get_value(args, "packing_overflow") == "split"
    return Batching(text=f"{rows} of {length} tokens ({packing})", row_length=length, splits_long=splits_long)
