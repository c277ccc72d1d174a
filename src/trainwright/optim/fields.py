"""Arguments of optimizer and schedule that transformers does not have."""

from __future__ import annotations

from typing import Any

from trainwright.config.setting import BY_RULES, RATE, FieldGroup, tunable


class RateFields(FieldGroup):
    """Rates of single parameters, and the end of a schedule."""

    layerwise_lr_decay: float | None = tunable(
        None,
        "Each layer learns at this share of the rate of the layer above it, above 0 to 1 (None: all alike).",
        on_resume=RATE,
        limits=BY_RULES,
        place=0,
    )
    lr_groups: dict[str, Any] | str | None = tunable(
        None,
        "Rates by parameter: {pattern of names: rate, or a factor such as '0.1x'}; the first that fits decides.",
        on_resume=RATE,
        syntax=("dict",),
        place=1,
    )
    cooldown: str | None = tunable(
        None,
        "Shape in which the rate falls from its present value to 0, from a branch or a longer max_steps on.",
        on_resume="the rate falls from its present value to 0 at the end of the run",
        choices=("linear", "cosine", "1-sqrt"),
        since="0.3",
        place=57,
    )
