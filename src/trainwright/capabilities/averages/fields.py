"""The argument `average`."""

from __future__ import annotations

from typing import Any  # as a user wrote the options

from trainwright.config.setting import FieldGroup, tunable


class AverageFields(FieldGroup):
    """Which average of the weights a run keeps."""

    average: dict[str, Any] | str | None = tunable(
        None,
        "Also keep an average of the weights: ema, swa or lawa, or {'kind': 'ema', 'decay': 0.9999, ...}.",
        on_resume="continues the average of the checkpoint; another kind of average begins at this step",
        syntax=("dict",),
        since="0.3",
        place=55,
    )
