"""The argument `incidents`."""

from __future__ import annotations

from trainwright.config.setting import FieldGroup, tunable


class IncidentFields(FieldGroup):
    """Whether bundles of bad steps are written."""

    incidents: bool = tunable(
        True,
        "Write batch, weights and random states of a bad step, an error or a hang into output_dir/incidents.",
        place=29,
    )
