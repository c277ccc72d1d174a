"""`trainwright verify --accept`: what a person changed in a checkpoint on purpose is listed in its manifest."""

from __future__ import annotations

from pathlib import Path

from trainwright.checkpoint.changes import accept
from trainwright.checkpoint.store import ANY_WEIGHTS


def accepted(folders: list[Path]) -> dict[Path, dict[str, str]]:
    """Accepts the files of checkpoints as they are; returns the differences of each: "changed", "added" or "deleted".

    Args:
        folders: the checkpoints.

    Returns:
        Checkpoint -> name of the file -> kind of the difference; empty where there was none.

    Raises:
        CheckpointError: a checkpoint has no sound manifest, or a link that leaves it. Those before it are accepted.
    """
    return {folder: accept(folder, not_finite=ANY_WEIGHTS.first_in) for folder in folders}
