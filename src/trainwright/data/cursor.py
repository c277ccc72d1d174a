"""Cursor: how far a run is in its data, in samples; and what a resume with steps of another size makes of it.

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

Samples in quarantine (`quarantine.py`) count in s, and not in n - s: R is of those that are left to train. Where others
are in quarantine than when the checkpoint was written, d is computed anew, as with another size.
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

# What an order of samples depends on besides the seed, by name; "kind" says what it is.
OrderKind: TypeAlias = dict[str, str | int | None]
# Where an order's lengths come from (its `lengths` says what they are), and what a resume takes over.
ORIGINS = ("entry", "column", "settings", "shares")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in the training data."""

    epoch: int  # the epoch, from 0
    samples: int  # samples of that epoch whose optimizer step is done, over all processes
    seed: int | None = None  # base of the shuffled order; None where the order comes from elsewhere
    num_samples: int | None = None  # samples in an epoch, where that is known
    shift: int = 0  # optimizer steps done beyond those that the position stands for (d above)
    # what counts as a sample where that is a batch formed by length: the settings it was formed by
    unit: str | None = None
    # on each process, where samples do not tell: its size over all processes is `chunk` if it is full
    batches: int | None = None
    chunk: int | None = None
    # the kind of order that the samples of the epoch have; None: an older checkpoint, which does not say
    order: OrderKind | None = None
    left_out: int = 0  # samples in quarantine, by which the epochs of the run were shorter; `samples` counts them

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the manifest of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cursor:
        """The cursor in a manifest, which has other entries too; older ones lack some. `check_entries` may raise."""
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
    """Raises CheckpointError for the first entry of a cursor, which a stranger may have written, that no run writes."""
    wrong = [name for name in COUNTS if values.get(name) is not None and not is_count(values[name])]
    wrong += [name for name in NOT_ZERO if values.get(name) == 0]
    wrong += [name for name in ("epoch", "samples") if values.get(name) is None]
    shift = values.get("shift", 0)
    wrong += [] if isinstance(shift, int) and is_count(abs(shift)) else ["shift"]
    kinds = {"unit": str, "order": dict}
    wrong += [name for name, kind in kinds.items() if not isinstance(values.get(name), (kind, type(None)))]
    if wrong:
        found = reprlib.repr(values.get(wrong[0]))
        raise CheckpointError(f"The position in the manifest has {wrong[0]}={found}, which no run writes.")


@dataclass(slots=True, kw_only=True)
class LoaderState:
    """State of a loader that a checkpoint keeps besides the cursor, on each process."""

    # python's, numpy's and torch's states from before anything of this epoch was drawn, its order first
    epoch_start: dict[str, Any] | None = None
    before_ahead: dict[str, Any] | None = None  # the same from before the batch that was fetched ahead
    # and from before the call that gave the batch trained last, where the dataloader may fetch ahead itself
    before_given: dict[str, Any] | None = None
    # of a stream or of a user's dataloader, by the kind of position; None where the cursor says it all
    position: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSize:
    """Samples of a batch over all processes, and batches of an optimizer step."""

    chunk: int
    micro_batches: int

    @classmethod
    def of_checkpoint(cls, cursor: Mapping[str, Any], *, world_size: int, now: WindowSize) -> WindowSize:
        """The size of the steps that `world_size` processes took; `now` for what the cursor does not say."""
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

    `plan` is of a fresh run; `batches_left` of the cursor's epoch, in this run's batches; `before` and `now` are the
    sizes of the steps. `counts_epochs`: the run ends after so many epochs, not after so many steps.
    """
    if plan.has_open_end:
        if before == now:
            return plan, ""
        return plan, f"steps are now of {now} samples instead of {before}, until the data ends"
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
        f"steps are now of {now} samples instead of {before}: it continues with sample {cursor.samples + 1} of "
        f"{plan.num_examples} in epoch {cursor.epoch + 1}, with {plan.max_steps - step} steps to go"
    )


def check_same_data(cursor: Cursor, num_samples: int | None, unit: str | None = None) -> None:
    """Raises DataError in the middle of an epoch whose samples are more or fewer now, or are grouped otherwise."""
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


def is_same_order(before: OrderKind, now: OrderKind) -> bool:
    """Returns True if two kinds of order give the same samples for the same seed."""
    names = (before.keys() | now.keys()).difference(ORIGINS)
    return all(before.get(name) == now.get(name) for name in names)


def raise_another_order(cursor: Cursor, now: OrderKind) -> NoReturn:
    """Raises a DataError with both orders: that of the epoch under way cannot be made again."""
    before = cursor.order or {}
    if is_same_order({**before, "lengths": None}, {**now, "lengths": None}):
        what = f"is in {_named(before, now)}, and its samples have other lengths now"
    else:
        what = f"has the order of {_named(before, now)}, and this run that of {_named(now, before)}"
    raise DataError(
        f"The checkpoint stands in the middle of epoch {cursor.epoch + 1}. That epoch {what}, so which samples are "
        "left cannot be told. Resume with the same settings and data, or begin that epoch again with "
        "ignore_data_skip=True."
    )


def _named(kind: OrderKind, other: OrderKind) -> str:
    """An order in words, with the settings in which it differs from another one of its kind."""
    name = str(kind.get("kind")).replace("_", " ")
    if "sampler" in kind:
        return f"the sampler {kind['sampler']}"
    hidden = {"kind", "lengths", *ORIGINS}
    settings = [f"{key}={value}" for key, value in kind.items() if key not in hidden and other.get(key) != value]
    return f"a {name} ({', '.join(settings)})" if settings and other.get("kind") == kind.get("kind") else f"a {name}"
