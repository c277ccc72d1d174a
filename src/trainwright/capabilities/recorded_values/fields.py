"""The argument `record_values`."""

from __future__ import annotations

from trainwright.config.setting import FieldGroup, not_compared


class RecordedValuesFields(FieldGroup):
    """The steps whose values are recorded."""

    record_values: str | None = not_compared(  # numbers too; argument parsers want one type that text converts to
        None,
        "Write fingerprints of all values of these steps for `trainwright diff`: '1-3', or a number of first steps.",
        since="0.3",
        place=26,
    )
