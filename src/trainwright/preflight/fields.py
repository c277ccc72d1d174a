"""Arguments of what looks at a whole trainer before its first step: `preflight` and `speed`."""

from __future__ import annotations

from typing import Any

from trainwright.config.setting import FieldGroup, not_compared, tunable


class FirstLookFields(FieldGroup):
    """The first look at batches and a step."""

    preflight: bool = tunable(
        True,
        "Look at the first batches and the first step of a training, and warn of probable mistakes.",
        place=23,
    )


class SpeedFields(FieldGroup):
    """Settings that are measured."""

    speed: dict[str, Any] | str | None = not_compared(
        None,
        "auto: measure before step 1 which settings are faster, and keep proved ones; or a choice, {setting: value}.",
        syntax=("dict",),
        place=4,
    )
