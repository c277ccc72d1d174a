"""The arguments of the guard: policies for bad steps, what a spike is, and how a run goes back."""

from __future__ import annotations

from trainwright.config.setting import COUNT, FieldGroup, Range, tunable


class GuardFields(FieldGroup):
    """What becomes of a step with an unusable loss or gradient."""

    on_nonfinite: str = tunable(
        "skip",
        "When loss or gradient is not finite: skip the update, roll back, stop before it, warn and update, ignore.",
        choices=("skip", "rollback", "stop", "warn", "ignore"),
        place=28,
    )
    on_spike: str = tunable(
        "off",
        "When loss or gradient norm is far above the steps before: warn, skip the update, roll back, stop.",
        choices=("off", "warn", "skip", "rollback", "stop"),
        place=30,
    )
    spike_threshold: float = tunable(
        6.0,
        "A spike is this number of robust deviations above the median (1.4826 times the MAD).",
        limits=Range(0, open_low=True),
        place=31,
    )
    spike_window: int = tunable(
        128,
        "Accepted steps that on_spike compares a step with.",
        limits=COUNT,
        place=32,
    )
    spike_warmup: int = tunable(
        64,
        "Accepted steps before on_spike compares the first one; at most spike_window.",
        limits=COUNT,
        place=33,
    )
    max_skipped_steps: int = tunable(
        20,
        "Skipped steps in a row after which training stops with an error (0: any number).",
        limits=Range(0, whole=True),
        place=34,
    )
    max_rollbacks: int = tunable(
        3,
        "Rollbacks to the same snapshot; the next one ends training.",
        limits=COUNT,
        place=35,
    )
    rollback_every: int = tunable(
        50,
        "Steps between two snapshots in host memory for rollbacks (0: they go back to the newest checkpoint).",
        limits=Range(0, whole=True),
        place=36,
    )
    rollback_skip_samples: int = tunable(
        0,
        "Samples after a rollback that are skipped too, in whole steps.",
        limits=Range(0, whole=True),
        place=37,
    )
    max_skipped_share: float = tunable(
        0.5,
        "Share of the last 100 steps above which skipped steps stop training with an error (0: any share).",
        limits=Range(0, 1),
        since="0.3",
        place=45,
    )
