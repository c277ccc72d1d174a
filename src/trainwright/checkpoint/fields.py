"""Arguments of checkpoints that transformers does not have: when they are saved and kept, and how."""

from __future__ import annotations

from trainwright.config.setting import MAYBE_COUNT, FieldGroup, fixed, not_compared, tunable


class WritingFields(FieldGroup):
    """How a checkpoint is written, and what a failure does."""

    save_async: bool | None = tunable(
        None,
        "Write checkpoints asynchronously (None: unless your code looks at their files; True: even then).",
        bare_flag=True,
        place=13,
    )
    save_failure: str = fixed(
        "stop",
        "When a checkpoint cannot be written, as on a full disk: stop training, or continue without it.",
        choices=("stop", "continue"),
        place=14,
    )
    log_history_limit: int | None = not_compared(
        None,
        "Logs that state.log_history and each checkpoint hold, the newest (None: all). journal.jsonl has all of them.",
        limits=MAYBE_COUNT,
        place=58,
    )


class OccasionFields(FieldGroup):
    """Further occasions to save."""

    save_every: str | None = fixed(
        None,
        "Save when the last save is this long ago, in addition to save_strategy: '20min', '1h', a number of seconds.",
        syntax=("duration",),
        place=17,
    )
    save_on_exception: bool = tunable(
        False, "When training ends with an error, save the last finished step first.", place=20
    )


class RetentionFields(FieldGroup):
    """Checkpoints that are kept beyond the limit."""

    save_keep_every: str | None = tunable(
        None,
        "With save_total_limit: beyond the limit, keep one checkpoint for each such length of time, as '2h'.",
        syntax=("duration",),
        place=18,
    )
    save_keep_every_steps: int | None = tunable(
        None,
        "With save_total_limit: beyond the limit, keep the checkpoints of steps that are multiples of this.",
        limits=MAYBE_COUNT,
        place=19,
    )
