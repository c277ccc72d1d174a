"""`trainwright verify --accept`: updates a checkpoint's manifest for files that were changed on purpose."""

from __future__ import annotations

from pathlib import Path

from trainwright.checkpoint.changes import accept
from trainwright.checkpoint.store import ANY_WEIGHTS


def accepted(folders: list[Path]) -> dict[Path, dict[str, str]]:
    """Accepts the current files of checkpoints; returns the differences of each: "changed", "added" or "deleted".

    Args:
        folders: the checkpoints.

    Returns:
        Checkpoint -> name of the file -> kind of the difference; empty if there was none.

    Raises:
        CheckpointError: a checkpoint has no valid manifest, or a link that leaves it. Earlier ones are accepted.
    """
    return {folder: accept(folder, not_finite=ANY_WEIGHTS.first_in) for folder in folders}
