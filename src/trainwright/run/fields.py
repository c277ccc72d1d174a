"""Arguments of a run that transformers does not have: its loss, and how long it waits."""

from __future__ import annotations

from trainwright.config.setting import NOT_NEGATIVE, FieldGroup, fixed, tunable


class LossFields(FieldGroup):
    """How losses are computed and weighted."""

    loss_weighting: str | None = tunable(
        None,
        "Weights of mean losses: batches (alike), items (by labels), original (HF's); None: by model.",
        choices=("batches", "items", "original"),
        place=2,
    )
    loss_kernel: str | None = tunable(
        None,
        "Loss of a causal language model without its logits: auto, chunked, liger, cce (None: the model's own).",
        choices=("auto", "chunked", "liger", "cce"),
        place=3,
    )


class HangFields(FieldGroup):
    """A limit for steps that do not end."""

    hang_timeout: float = fixed(
        0.0,
        "Seconds without a finished step after which all processes show their stacks and end (0: never).",
        limits=NOT_NEGATIVE,
        place=11,
    )
