"""Selection of files for the Hub, with their paths and the message of the commit. Only lists directories."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from trainwright._types import (
    GUARD_STATE_NAME,
    MANIFEST_NAME,
    OPTIMIZER_NAME,
    PREFIX_CHECKPOINT_DIR,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
)
from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerState

LAST_CHECKPOINT = "last-checkpoint"
END, CHECKPOINT, ALL_CHECKPOINTS = "end", "checkpoint", "all_checkpoints"

# Of an output directory: checkpoints go where the strategy says, the journal (which names paths and commits of this
# machine) and what is half-written stay here.
NOT_FROM_ROOT = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*", "journal.jsonl", ".*.partial", f".{PREFIX_CHECKPOINT_DIR}-*",
                 ".lease-*", "incidents/*", ".git/*", ".cache/*")  # fmt: skip
# Of a checkpoint: what only a resume needs is no part of the model.
NOT_OF_THE_MODEL = (OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME, "rng_state*.pth", "data_position*.pth",
                    TRAINER_STATE_NAME, MANIFEST_NAME, GUARD_STATE_NAME, "optimizer.bin", "optimizer_*/*",
                    "pytorch_model_*",
                    "global_step*/*", "latest")  # fmt: skip


def files_below(folder: Path, *, without: Iterable[str] = ()) -> dict[str, Path]:
    """Relative path -> file, of all that fit none of the patterns.

    Directories that a pattern covers are not looked into: others write and delete there meanwhile.
    """
    patterns, found = tuple(without), {}
    for place, folders, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        # A pattern that ends in a star covers a directory if it fits its name and a slash: a star fits slashes too.
        folders[:] = [
            name
            for name in folders
            if not any(one.endswith("*") and fnmatch(f"{(below / name).as_posix()}/", one) for one in patterns)
        ]
        for name in names:
            path, relative = Path(place, name), (below / name).as_posix()
            if not any(fnmatch(relative, one) for one in patterns) and path.is_file():
                found[relative] = path
    return dict(sorted(found.items()))


def model_files(checkpoint: Path) -> dict[str, Path]:
    """Returns the files of a checkpoint that a user of the model needs."""
    return files_below(checkpoint, without=NOT_OF_THE_MODEL)


def root_files(root: Path) -> dict[str, Path]:
    """Returns the files of an output directory to publish."""
    return files_below(root, without=NOT_FROM_ROOT)


def path_of_checkpoint(strategy: str, checkpoint: Path) -> str | None:
    """Returns the path of a checkpoint in the repository by strategy; None if only the model is uploaded."""
    return {CHECKPOINT: LAST_CHECKPOINT, ALL_CHECKPOINTS: checkpoint.name}.get(strategy)


def message(args: Arguments, state: TrainerState) -> str:
    """Returns the message of a commit during training."""
    by_steps = getattr(args.save_strategy, "value", args.save_strategy) == "steps"
    return f"Training in progress, {f'step {state.global_step}' if by_steps else f'epoch {int(state.epoch)}'}"


def repo_name(args: Arguments) -> str:
    """Returns the name of the repository: `hub_model_id`, or that of the output directory."""
    return str(args.hub_model_id or Path(args.output_dir).absolute().name)


def strategy_of(args: Arguments) -> str:
    """Returns `hub_strategy` as text."""
    return str(getattr(args.hub_strategy, "value", args.hub_strategy))
