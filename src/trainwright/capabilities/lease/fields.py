"""The argument `output_dir_wait_s`."""

from __future__ import annotations

from trainwright.config.setting import NOT_NEGATIVE, FieldGroup, not_compared


class LeaseFields(FieldGroup):
    """How long a run waits for the lease of its directory."""

    output_dir_wait_s: float = not_compared(
        0.0,
        "Seconds to wait for another live run that holds output_dir, before this one is refused (0: at once).",
        limits=NOT_NEGATIVE,
        place=15,
    )
