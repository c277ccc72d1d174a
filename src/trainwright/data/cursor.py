"""Cursor: the position of a run in its data, in samples, and how a resume with another step size interprets it.

A checkpoint states: g optimizer steps are done, and s samples of epoch e (from 0) are trained, over all processes. This
run takes batches of c samples (over all processes), a of them per step, from n samples per epoch:

    B = ceil(n / c) batches and S = ceil(B / a) steps in a full epoch
    R = ceil((n - s) / c) batches of epoch e remain, so B - R count as done, and S - ceil(R / a) steps
    p = e * S + S - ceil(R / a)         steps of this size that lead to the position
    d = g - p                           difference to the steps done; 0 until a resume changes the size

`global_step` stays g: it counts updates of the weights, and checkpoints are named by it. The rest is trained with the
new size, so `max_steps` is the length of a fresh run plus d; if the user set `max_steps`, it is kept, and the number of
epochs follows: ceil((max_steps - d) / S). `epoch` in the logs is e + (batches done) / B and ends on a whole number. The
schedule is at g of max_steps; `optim/` ensures that its rate does not jump.

    400 samples, 2 epochs, batches of 4: S = 100, 200 steps. Stopped after step 50: e = 0, s = 200. Resumed with batches
    of 8: B = S = 50, R = 25, p = 25, d = 25. The next step is 51, on samples 200-207, epoch 0.52; the epoch ends with
    step 75, the run with step 125 = 100 + 25.

The next resume reads d from the checkpoint, and keeps it if the sizes have not changed again.

Samples that a run leaves out (`sample_filter.py`) count in s, but not in n - s: R only covers samples that can be
trained. If others are left out since the checkpoint was written, d is recomputed, as for another size.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NoReturn, TypeAlias

from trainwright._types import is_count
from trainwright.config.plans import StepPlan
from trainwright.errors import CheckpointError, DataError

# Everything that an order of samples depends on besides the seed, by name; "kind" names the kind of order.
OrderKind: TypeAlias = dict[str, str | int | None]
# Origin of an order's lengths (`lengths` holds their digest), which a resume takes over.
ORIGINS = ("entry", "column", "settings", "shares")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in the training data."""

    epoch: int  # the epoch, from 0
    samples: int  # samples of that epoch with a finished optimizer step, over all processes
    seed: int | None = None  # base of the shuffled order; None if the order comes from elsewhere
    num_samples: int | None = None  # samples in an epoch, if known
    shift: int = 0  # optimizer steps done beyond the position (d above)
    # settings that a batch formed by length depends on, if such a batch counts as a sample
    unit: str | None = None
    # batches on each process, if samples do not determine it: a full batch of all processes has `chunk` samples
    batches: int | None = None
    chunk: int | None = None
    # kind of order of this epoch's samples; None in an older checkpoint, which does not record it
    order: OrderKind | None = None
    left_out: int = 0  # samples that were left out, by which epochs were shorter; `samples` includes them

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for the manifest of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cursor:
        """Returns the cursor in a manifest with other entries; older ones lack some. Raises like `check_entries`."""
        check_entries(values)
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known and value is not None})


COUNTS = (
    "epoch",
    "samples",
    "seed",
    "num_samples",
    "batches",
    "chunk",
    "batch_size",
    "micro_batches",
    "num_parts",
    "left_out",
)
NOT_ZERO = ("chunk", "batch_size", "micro_batches", "num_parts")


def check_entries(values: Mapping[str, Any]) -> None:
    """Raises CheckpointError for the first invalid entry of a cursor, which may come from an untrusted file."""
    wrong = [name for name in COUNTS if values.get(name) is not None and not is_count(values[name])]
    wrong += [name for name in NOT_ZERO if values.get(name) == 0]
    wrong += [name for name in ("epoch", "samples") if values.get(name) is None]
    shift = values.get("shift", 0)
    wrong += [] if isinstance(shift, int) and is_count(abs(shift)) else ["shift"]
    kinds = {"unit": str, "order": dict}
    wrong += [name for name, kind in kinds.items() if not isinstance(values.get(name), (kind, type(None)))]
    if wrong:
        found = reprlib.repr(values.get(wrong[0]))
        raise CheckpointError(f"The position in the manifest has an invalid {wrong[0]}: {found}.")


@dataclass(slots=True, kw_only=True)
class LoaderState:
    """State of a loader that a checkpoint stores besides the cursor, on each process."""

    # states of python, numpy and torch from before anything was drawn for this epoch, including its order
    epoch_start: dict[str, Any] | None = None
    before_ahead: dict[str, Any] | None = None  # the same from before fetching the batch ahead
    # the same from before the call that returned the last trained batch, if the dataloader may itself fetch ahead
    before_given: dict[str, Any] | None = None
    # position in a stream or a user's dataloader, depending on its kind; None if the cursor suffices
    position: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSize:
    """Samples of a batch over all processes, and batches per optimizer step."""

    chunk: int
    micro_batches: int

    @classmethod
    def from_checkpoint(cls, cursor: Mapping[str, Any], *, world_size: int, now: WindowSize) -> WindowSize:
        """Returns the step size with `world_size` processes; `now` fills in for values missing from the cursor."""
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
    """Returns the plan of a resumed run, and a message about it (empty if nothing changed).

    `plan` is that of a fresh run; `batches_left` counts the rest of the cursor's epoch in this run's batches; `before`
    and `now` are the step sizes. `counts_epochs`: the run ends after a number of epochs, not of steps.
    """
    if plan.has_open_end:
        if before == now:
            return plan, ""
        return plan, f"steps now have {now} samples instead of {before}, until the data ends"
    shift = cursor.shift
    if before != now or cursor.left_out != plan.num_left_out:
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
        f"steps now have {now} samples instead of {before}: the run continues with sample {cursor.samples + 1} of "
        f"{plan.num_examples} in epoch {cursor.epoch + 1}, with {plan.max_steps - step} steps to go"
    )


def check_same_data(cursor: Cursor, num_samples: int | None, unit: str | None = None) -> None:
    """Raises DataError in the middle of an epoch if its number of samples, or their grouping, has changed."""
    if cursor.samples > 0 and cursor.unit != unit:
        then, now = (one or "single samples" for one in (cursor.unit, unit))
        raise DataError(
            f"The checkpoint was saved in the middle of epoch {cursor.epoch + 1} with {then}, but this run has {now}, "
            "so the remaining samples are unknown. Resume with the same settings, or restart that epoch with "
            "ignore_data_skip=True."
        )
    if cursor.samples == 0 or None in (cursor.num_samples, num_samples) or cursor.num_samples == num_samples:
        return
    raise DataError(
        f"The training data had {cursor.num_samples} samples when the checkpoint was written, {cursor.samples} of them "
        f"trained in epoch {cursor.epoch + 1}, but now has {num_samples}, so the remaining samples are unknown. Resume "
        "with the same data, or restart that epoch with ignore_data_skip=True."
    )


def is_same_order(before: OrderKind, now: OrderKind) -> bool:
    """Returns True if two kinds of order yield the same samples for the same seed."""
    names = (before.keys() | now.keys()).difference(ORIGINS)
    return all(before.get(name) == now.get(name) for name in names)


def raise_another_order(cursor: Cursor, now: OrderKind) -> NoReturn:
    """Raises DataError with both orders: the order of the current epoch cannot be restored."""
    before = cursor.order or {}
    if is_same_order({**before, "lengths": None}, {**now, "lengths": None}):
        what = f"has the order of {_named(before, now)}, but the lengths of its samples have changed"
    else:
        what = f"has the order of {_named(before, now)}, but this run has the order of {_named(now, before)}"
    raise DataError(
        f"The checkpoint was saved in the middle of epoch {cursor.epoch + 1}. That epoch {what}, so the remaining "
        "samples are unknown. Resume with the same settings and data, or restart that epoch with "
        "ignore_data_skip=True."
    )


def _named(kind: OrderKind, other: OrderKind) -> str:
    """Describes an order in words, with the settings that differ from another order of its kind."""
    name = str(kind.get("kind")).replace("_", " ")
    if "sampler" in kind:
        return f"the sampler {kind['sampler']}"
    hidden = {"kind", "lengths", *ORIGINS}
    settings = [f"{key}={value}" for key, value in kind.items() if key not in hidden and other.get(key) != value]
    return f"a {name} ({', '.join(settings)})" if settings and other.get("kind") == kind.get("kind") else f"a {name}"
