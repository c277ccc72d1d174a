"""The arguments of the mirror: `checkpoint_mirror`, and what is copied there."""

from __future__ import annotations

from trainwright.config.setting import MAYBE_COUNT, FieldGroup, Range, not_compared


class MirrorFields(FieldGroup):
    """Copies of the checkpoints at a URL."""

    checkpoint_mirror: str | None = not_compared(
        None,
        "URL that gets copies of the checkpoints in the background, as s3://bucket/run; a resume finds them there.",
        since="0.3",
        place=47,
    )
    mirror_every: str | None = not_compared(
        None,
        "Copy a checkpoint to checkpoint_mirror if the last one was written this long before, as '1h' (None: each).",
        syntax=("duration",),
        since="0.3",
        place=48,
    )
    mirror_total_limit: int | None = not_compared(
        None,
        "Copies to keep at checkpoint_mirror: the newest, the best one included (None: all).",
        limits=MAYBE_COUNT,
        since="0.3",
        place=49,
    )
    mirror_max_mb_per_s: float | None = not_compared(
        None,
        "Megabytes a second that copies to checkpoint_mirror send at most (None: no limit).",
        limits=Range(0, open_low=True, optional=True),
        since="0.3",
        place=50,
    )
