"""A branch: a run with a directory of its own that continues a checkpoint of another run, which stays as it is.

It continues weights, optimizer, random states and position in the data as a resume does. Where it comes from is an
entry in its checkpoints (`extension.py`): one origin for each branching, the oldest first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright._types import JSONObject, StateDict
from trainwright.capability_table import RUN_FILES
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore, verified
from trainwright.config.fields import get_value, value_if_known
from trainwright.errors import ArgumentError, CheckpointError, CheckpointNotFoundError
from trainwright.support.door import MALFORMED, OwnFolder, RelativeName

NAME = "branch"  # name of the entry in a checkpoint


def describe_origin(checkpoint: Checkpoint) -> JSONObject:
    """Returns where a branch of a checkpoint comes from: the id of its run, the step, and the directory."""
    manifest = checkpoint.manifest
    step = checkpoint.state.global_step if manifest is None else manifest.step
    return {
        "run": "" if manifest is None else manifest.run_id,
        "step": step,
        "checkpoint": str(checkpoint.path.resolve()),
    }


def origins_in(checkpoint: Checkpoint) -> list[JSONObject]:
    """Returns the origins of the run of a checkpoint; empty if it is not a branch."""
    state = checkpoint.extension_states(0).get(NAME)
    return parse_origins(state) if state else []


def parse_origins(state: StateDict) -> list[JSONObject]:
    """Returns the origins in the saved state of a branch, the oldest first; CheckpointError if it has none."""
    try:
        return [
            {"run": str(one["run"]), "step": int(one["step"]), "checkpoint": str(one["checkpoint"])}
            for one in state["origins"]
        ]
    except MALFORMED as error:
        raise CheckpointError(f"The checkpoint does not say where its run comes from: {error!r}.") from error


def checkpoint_at(run: str | Path, step: int) -> Path:
    """Returns the checkpoint of a step; CheckpointNotFoundError names the run's checkpoints."""
    store = CheckpointStore(run)
    steps = store.steps()
    if step not in steps:
        there = f"it has step {', '.join(map(str, steps))}" if steps else "it has none"
        raise CheckpointNotFoundError(f"{run} has no checkpoint of step {step}; {there}.")
    return store.path(step)


@dataclass(frozen=True, slots=True)
class BranchOrigin:
    """The checkpoint in `branch_from`, from which a run begins until it has one of its own.

    Attributes:
        path: the checkpoint, as the user wrote it.
        mirror: where copies of the new run go; None: nowhere.
    """

    path: str
    mirror: str | None

    def check(self) -> None:
        """Raises ArgumentError if a branch would write to the mirror of its origin."""
        if self.mirror is not None and (Checkpoint(self.path).arguments or {}).get("checkpoint_mirror") == self.mirror:
            raise ArgumentError(
                f"checkpoint_mirror={self.mirror!r} holds copies of the run of {self.path}. Give the branch its own "
                "URL."
            )

    def begin_or_continue(self, own: Checkpoint | None) -> Checkpoint:
        """Returns the checkpoint that the branch begins from, or its `own` newest one if it has some already.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            CheckpointError: it is damaged.
            ArgumentError: the own checkpoint is of a run that does not come from there, or a run is named in its place.
        """
        if own is None:
            steps = CheckpointStore(self.path).steps()
            if steps:
                raise ArgumentError(
                    f"branch_from={self.path!r} is the directory of a run. Name one of its checkpoints, step "
                    f"{', '.join(map(str, steps))}, such as {str(CheckpointStore(self.path).path(steps[-1]))!r}."
                )
            return verified(self.path, argument="branch_from")
        origins = origins_in(own)
        if origins and _is_origin(self.path, origins[-1]):
            return own
        of_which = f"a branch of {origins[-1]['checkpoint']}" if origins else "another run"
        raise ArgumentError(
            f"{own.path.parent} holds {of_which} (step {own.state.global_step}), not a branch of {self.path}. Choose "
            "another output_dir, or pass overwrite_output_dir=True to delete its checkpoints."
        )

    def is_begun_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether a run that continues a checkpoint begins here."""
        return checkpoint.path.resolve() == Path(self.path).resolve()

    def bring_along(self, checkpoint: Checkpoint, folder: str) -> None:
        """Copies the list of samples in quarantine, which a run keeps next to its checkpoints and its branch needs."""
        bring_along(checkpoint, folder)


def find_origin(args: Any) -> BranchOrigin | None:  # arguments of transformers too
    """Returns the origin of a run with `branch_from`."""
    path = get_value(args, "branch_from")
    return None if path is None else BranchOrigin(path, value_if_known(args, "checkpoint_mirror"))


def _is_origin(branch_from: str, origin: JSONObject) -> bool:
    """Returns whether a run comes from there, by the id of the run if the checkpoint still exists."""
    manifest = Manifest.read(Path(branch_from))
    if manifest is None:
        return Path(branch_from).name == Path(origin["checkpoint"]).name
    return (manifest.run_id, manifest.step) == (origin["run"], origin["step"])


def bring_along(checkpoint: Checkpoint, folder: str) -> None:
    """Copies the files that a run keeps next to its checkpoints and its branch needs, as the list of a quarantine."""
    for file in RUN_FILES:
        source = checkpoint.path.parent / file.name
        target = Path(folder) / file.name
        if file.is_inherited and source.is_file() and not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            OwnFolder(folder).take_in(source, RelativeName.parse(file.name))
