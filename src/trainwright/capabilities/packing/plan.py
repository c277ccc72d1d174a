"""How rows are packed, for the plan of a run and the lines about it."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright._types import counted
from trainwright.config.fields import get_value
from trainwright.config.plans import Batching
from trainwright.config.protocol import Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan(Batching):
    """Packed rows."""

    joins_samples: bool = True
    row_length: int  # tokens of a row
    splits_long: bool = False  # a longer sample is split over rows


def plan_batches(args: Arguments) -> RowPlan | None:
    """Returns the rows of the arguments; None if they pack none."""
    packing = get_value(args, "packing")
    if packing is None:
        return None
    length = get_value(args, "packing_length")
    rows = counted(args.per_device_train_batch_size, "row")
    splits_long = get_value(args, "packing_overflow") == "split"
    text = f"{rows} of {length} tokens ({packing})"
    return RowPlan(text=text, row_length=length, splits_long=splits_long)
