"""The argument `live_control`."""

from __future__ import annotations

from trainwright.config.setting import FieldGroup, not_compared


class ControlFields(FieldGroup):
    """Whether a run takes commands."""

    live_control: bool | str = not_compared(
        False,
        "Take commands of `trainwright ctl` while training; a text: repeat the commands in the journal of that run.",
        bare_flag=True,
        since="0.3",
        place=51,
    )
