"""The argument `journal`."""

from __future__ import annotations

from trainwright.config.setting import FieldGroup, not_compared


class JournalFields(FieldGroup):
    """Whether a run is recorded."""

    journal: bool | None = not_compared(
        None,
        "Record the run in journal.jsonl (None: if it saves or has a tracker).",
        since="0.3",
        place=46,
    )
