"""Where a resumed run stands, and how far it still goes, when its steps are of another size than the checkpoint's.

A checkpoint says: g optimizer steps are done, and of epoch e (from 0) s samples are trained, over all processes. This
run takes batches of c samples (over all processes), a of them per step, from n samples an epoch:

    B = ceil(n / c) batches and S = ceil(B / a) steps in a full epoch
    R = ceil((n - s) / c) batches are left of epoch e, so B - R count as done, and S - ceil(R / a) steps
    p = e * S + S - ceil(R / a)         steps of this size that the position stands for
    d = g - p                           by which steps done differ from that; 0 until a resume changes the size

`global_step` stays g: it counts updates of the weights, and checkpoints are named by it. What is left is trained in the
new size, so `max_steps` is the length of a fresh run plus d; where `max_steps` was given it stays, and the number of
epochs follows: ceil((max_steps - d) / S). `epoch` in the logs is e + (batches done) / B and ends on a whole number. The
schedule stands at g of max_steps; that its rate does not jump is the business of `optim/`.

    400 samples, 2 epochs, batches of 4: S = 100, 200 steps. Stopped after step 50: e = 0, s = 200. Resumed with batches
    of 8: B = S = 50, R = 25, p = 25, d = 25. The next step is 51, on samples 200-207, epoch 0.52; the epoch ends with
    step 75, the run with step 125 = 100 + 25.

The next resume finds d in the checkpoint: if sizes have not changed again, it counts on with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from trainwright.config.plans import StepPlan
from trainwright.data.cursor import Cursor
from trainwright.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSize:
    """Samples of a batch over all processes, and batches of an optimizer step."""

    chunk: int
    micro_batches: int

    @classmethod
    def of_checkpoint(cls, cursor: dict[str, Any], *, world_size: int, now: WindowSize) -> WindowSize:
        """As the checkpoint says; what it does not say is as now."""
        chunk = cursor.get("chunk") or cursor.get("batch_size", now.chunk // world_size) * world_size
        return cls(chunk=int(chunk), micro_batches=int(cursor.get("micro_batches", now.micro_batches)))

    def __str__(self) -> str:
        times = f" x {self.micro_batches} accumulated" if self.micro_batches > 1 else ""
        return f"{self.chunk}{times}"


def plan_resume(
    plan: StepPlan,
    cursor: Cursor,
    *,
    step: int,
    batches_left: int,
    before: WindowSize,
    now: WindowSize,
    counts_epochs: bool,
) -> tuple[StepPlan, str]:
    """The plan of a resumed run, and what there is to say about it (empty where nothing changed).

    Args:
        plan: of a fresh run with these arguments.
        step: optimizer steps done.
        batches_left: of the cursor's epoch, in this run's batches.
        counts_epochs: the run ends after so many epochs, not after so many steps.
    """
    if plan.has_open_end:
        if before == now:
            return plan, ""
        return plan, f"steps are now of {now} samples instead of {before}, until the data ends"
    shift = cursor.shift
    if before != now:
        shift = step - (cursor.epoch + 1) * plan.steps_per_epoch + math.ceil(batches_left / plan.micro_batches)
    if shift == 0:
        return plan, ""
    if counts_epochs:
        plan = replace(plan, max_steps=max(plan.max_steps + shift, step), shift=shift)
    else:
        plan = replace(plan, num_epochs=math.ceil((plan.max_steps - shift) / plan.steps_per_epoch), shift=shift)
    if before == now:
        return plan, ""
    return plan, (
        f"steps are now of {now} samples instead of {before}: it goes on with sample {cursor.samples + 1} of "
        f"{plan.num_examples} in epoch {cursor.epoch + 1}, with {plan.max_steps - step} steps to go"
    )


def check_same_data(cursor: Cursor, num_samples: int | None, unit: str | None = None) -> None:
    """In the middle of an epoch, its order must still be that of the same samples, or of the same groups of them.

    Raises:
        DataError: there are more or fewer samples than when the checkpoint was written, or they are grouped otherwise.
    """
    if cursor.samples > 0 and cursor.unit != unit:
        then, now = (one or "single samples" for one in (cursor.unit, unit))
        raise DataError(
            f"The checkpoint stands in the middle of epoch {cursor.epoch + 1} with {then}, and this run has {now}, "
            "so which samples are left cannot be told. Resume with the same settings, or begin that epoch again with "
            "ignore_data_skip=True."
        )
    if cursor.samples == 0 or None in (cursor.num_samples, num_samples) or cursor.num_samples == num_samples:
        return
    raise DataError(
        f"The training data had {cursor.num_samples} samples when the checkpoint was written, {cursor.samples} of them "
        f"trained in epoch {cursor.epoch + 1}, and has {num_samples} now: which ones are left cannot be told. Resume "
        "with the same data, or begin that epoch again with ignore_data_skip=True."
    )
