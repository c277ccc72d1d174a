"""The argument `max_tokens_per_batch`."""

from __future__ import annotations

from trainwright.config.setting import MAYBE_COUNT, FieldGroup, tunable


class TokenBudgetFields(FieldGroup):
    """How many tokens a batch has."""

    max_tokens_per_batch: int | None = tunable(
        None,
        "Batches of samples of similar length, with at most this number of tokens, padding included.",
        limits=MAYBE_COUNT,
        place=6,
    )
