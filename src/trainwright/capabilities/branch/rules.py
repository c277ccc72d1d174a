"""The rule of `branch_from`: a branch has a directory of its own."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright._types import PREFIX_CHECKPOINT_DIR, is_url, without_tokens
from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, rule


def _is_inside_run(output_dir: str, checkpoint: str) -> bool:
    """Returns whether a directory is that of the run of a checkpoint, or is in a checkpoint of it."""
    folder = Path(output_dir).resolve()
    origins = Path(checkpoint).parent.resolve() / Path(checkpoint).name, Path(checkpoint).resolve()
    for origin in origins:  # as it is named, and the directory that it may be a link to
        inner = folder.relative_to(origin.parent).parts if folder.is_relative_to(origin.parent) else None
        if inner == () or folder.is_relative_to(origin):
            return True
        if inner is not None and inner[0].startswith(f"{PREFIX_CHECKPOINT_DIR}-"):
            return True
    return False


@rule(Stage.CONSTRUCTION, "branch_from", "output_dir")
def branch_has_its_own_directory(args: Arguments) -> str | None:
    origin = get_value(args, "branch_from")
    if origin is None:
        return None
    if is_url(origin):
        return (
            f"branch_from={without_tokens(str(origin))!r} is a URL. Copy the checkpoint into a directory, and name it."
        )
    if _is_inside_run(str(args.output_dir), os.path.abspath(origin)):
        return (
            f"branch_from={origin!r} is of the run in output_dir={args.output_dir!r}, and a branch leaves the run "
            "that it begins from as it is. Give it another output_dir, or continue the run with resume_from_checkpoint."
        )
    return None
