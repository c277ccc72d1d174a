"""The argument `branch_from`."""

from __future__ import annotations

from trainwright.config.setting import FieldGroup, not_compared


class BranchFields(FieldGroup):
    """The checkpoint of another run from which a run begins."""

    branch_from: str | None = not_compared(
        None,
        "Checkpoint of another run to begin from, as a run of its own; once it has saved, it continues there.",
        syntax=("path",),
        since="0.3",
        place=56,
    )
