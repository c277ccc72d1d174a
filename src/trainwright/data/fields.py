"""Arguments of the data that transformers does not have: batches, order, names of rows."""

from __future__ import annotations

from trainwright.config.setting import (
    MAYBE_COUNT,
    NOT_NEGATIVE,
    ORDER,
    FieldGroup,
    fixed,
    not_compared,
    tunable,
)


class BatchFields(FieldGroup):
    """To what a batch is padded, and how long it is waited for."""

    dataloader_timeout: float = tunable(
        0.0,
        "Seconds to wait for a batch of the workers, after which an error shows the stack of the hanging one "
        "(0: without end).",
        limits=NOT_NEGATIVE,
        place=10,
    )
    pad_to_multiple_of: int | None = fixed(
        None,
        "The default collator pads to a multiple of this number of tokens, so there are fewer shapes to compile.",
        limits=MAYBE_COUNT,
        place=16,
    )


class OrderFields(FieldGroup):
    """The order of samples, and random draws in them."""

    seed_samples: bool = tunable(
        False,
        "Random draws in samples and the collator depend on seed, epoch and sample only, not on the number of workers.",
        place=24,
    )
    shuffle_method: str = tunable(
        "auto",
        "Shuffling: permutation (an array of indices), feistel (computed, no memory), auto (that above 2^24 rows).",
        on_resume=ORDER,
        choices=("auto", "permutation", "feistel"),
        place=27,
    )


class RowNameFields(FieldGroup):
    """Names of rows."""

    id_column: str | None = not_compared(
        None,
        "Column with the names of rows in the ledger, the quarantine and messages (None: index, or line of a file).",
        since="0.3",
        place=44,
    )
