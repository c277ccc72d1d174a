"""Arguments of our callbacks: limits of time, signals, the profiler."""

from __future__ import annotations

from trainwright.config.setting import NOT_NEGATIVE, FieldGroup, fixed, tunable


class EndFields(FieldGroup):
    """What ends a run before its last step."""

    max_train_time: str | None = fixed(  # numbers too; argument parsers want one type that text converts to
        None,
        "Save and stop in time to end within this: '8h', '1h30m', a number of seconds (None: no limit).",
        syntax=("duration",),
        place=12,
    )
    signal_grace_s: float = fixed(
        10.0,
        "Seconds after a signal that ends a run in which further ones do not abort its save (Ctrl-C twice does).",
        limits=NOT_NEGATIVE,
        place=21,
    )
    slurm_requeue: bool = fixed(
        False,
        "When SIGTERM or SIGUSR1 ends a job of Slurm, put it back into the queue once the checkpoint is saved.",
        place=22,
    )


class ProfileFields(FieldGroup):
    """Steps that are traced."""

    profile: str | None = tunable(  # numbers too; argument parsers want one type that text converts to
        None,
        "Trace steps with torch's profiler into output_dir/profile: '10-15', or a number of steps after the first two.",
        place=25,
    )
