"""The plan of the guard: its policies, from the arguments."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from trainwright.config import resolve
from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPlan:
    """Policies for bad steps."""

    on_nonfinite: str = "skip"  # loss or gradient is not finite: skip, rollback, stop, warn or ignore
    on_spike: str = "off"  # loss or norm far above the recent ones: off, warn, skip, rollback or stop
    spike_threshold: float = 6.0  # how far, in robust deviations
    spike_window: int = 128  # accepted steps that are compared with
    spike_warmup: int = 64  # accepted steps before the first comparison
    max_skipped_steps: int = 20  # skipped steps in a row after which the run ends; 0: any number
    max_skipped_share: float = 0.5  # share of skipped steps among the last 100 after which the run ends; 0: any share
    max_rollbacks: int = 3  # rollbacks to one snapshot; the next one ends the run
    rollback_every: int = 50  # steps between two snapshots in memory; 0: the newest checkpoint is gone back to
    rollback_skip_samples: int = 0  # samples skipped after a rollback


def make_plan(args: Arguments) -> GuardPlan:
    """Returns the policies for bad steps."""
    plan = GuardPlan(**{field.name: get_value(args, field.name) for field in fields(GuardPlan)})
    return replace(plan, on_nonfinite=resolve.nonfinite_policy(args))
