"""Checkpoints on their way to the disk: where, when in the background, with room enough, and which may go."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

from trainwright._types import DATA_POSITION_NAME, RNG_STATE_NAME, TRAINER_STATE_NAME
from trainwright.checkpoint import disk_space, rng, training_state
from trainwright.checkpoint.deferred_io import IMMEDIATE, FileSink
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.retention import Keep, Saved, to_remove
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import resolve
from trainwright.data.loader import Loader
from trainwright.engine.base import Engine
from trainwright.errors import (
    ArgumentError,
)
from trainwright.state.exportable_state import collect_states
from trainwright.state.run_state import RunState

logger = logging.getLogger(__name__)


def prepare_output(args: Any, folder: str, *, is_fresh: bool) -> None:
    """Deals with checkpoints of an earlier run where this one writes, as `overwrite_output_dir` says.

    Raises:
        ArgumentError: there are some, and `overwrite_output_dir` is False.
    """
    if not args.should_save:
        return
    store = CheckpointStore(folder)
    store.clean()
    steps = store.steps()
    if not is_fresh or not steps:
        return
    overwrite = getattr(args, "overwrite_output_dir", None)
    found = f"output_dir={folder!r} holds checkpoints of an earlier run (steps {', '.join(map(str, steps))})"
    if overwrite is False:
        raise ArgumentError(
            f"{found}, and overwrite_output_dir=False. Resume with resume_from_checkpoint=True, choose another "
            "output_dir, or pass overwrite_output_dir=True to delete them."
        )
    if overwrite:
        for step in steps:
            store.remove(step)
        return
    logger.warning(
        "%s. This run starts afresh beside them and replaces those of the same step. Resume with "
        "resume_from_checkpoint=True, or delete them with overwrite_output_dir=True.", found,
    )  # fmt: skip


def new_run_id() -> str:
    return uuid.uuid4().hex


def save_rng(folder: str, loader: Loader | None, engine: Engine, *, writes: bool, sink: FileSink = IMMEDIATE) -> None:
    """Random states and data positions of all processes, in files of their own; the writing process writes them.

    Processes that work on the same batches draw the same, so they have one file.
    """
    states, position = rng.capture(), None
    if loader is not None:
        state = loader.state()
        states |= {"loader_epoch_start": state.epoch_start, "loader_before_ahead": state.before_ahead}
        position = state.position
    every = engine.objects_of_replicas((states, position))

    def write(nothing: Any) -> None:
        for rank, (of_rank, where) in enumerate(every):
            rng.save(Path(folder) / rng_name(rank, len(every)), of_rank)
            if where is not None:
                training_state.save_data_position(where, Path(folder) / position_name(rank, len(every)))

    if writes:
        sink.put((), write)  # nobody changes these states, so none is copied; they take a while to write


def rng_name(rank: int, num_processes: int) -> str:
    """Name of the file with the random states of a process."""
    return _name_of(RNG_STATE_NAME, rank, num_processes)


def position_name(rank: int, num_processes: int) -> str:
    """Name of the file with the data position of a process."""
    return _name_of(DATA_POSITION_NAME, rank, num_processes)


def _name_of(name: str, rank: int, num_processes: int) -> str:
    stem, dot, ending = name.partition(".")
    return name if num_processes == 1 else f"{stem}_{rank}{dot}{ending}"


def saves_in_background(args: Any, run: RunState, *, is_watched: bool) -> bool:
    """Whether a save may return before its files are there.

    Args:
        is_watched: code of the user's runs during a save or when it is done, and may look at the files.
    """
    asked = getattr(args, "save_async", None)
    return asked is not False and not run.is_interrupted and (asked is True or not is_watched)


def check_first_checkpoint(args: Any, folder: str, model: Any) -> None:
    """Before step 1: whether the first checkpoint can fit on the disk.

    Raises:
        CheckpointWriteError: not even its weights do, and `save_failure` is "stop".
    """
    if args.save_strategy == "no":
        return
    root, what = Path(folder), "A checkpoint"
    surely = disk_space.weights_bytes(model)
    likely = surely + (0 if args.save_only_model else disk_space.estimated_optimizer_bytes(model))
    free = disk_space.free_bytes(root)
    if free is None or free >= likely:
        return
    if free < surely and getattr(args, "save_failure", "stop") == "stop":
        disk_space.check_free_space(root, surely, what=what)
    logger.warning("%s", disk_space.shortage_message(root, likely, free, what=f"{what}, estimated with its optimizer,"))


def check_next_checkpoint(args: Any, folder: Path, model: Any, optimizer: Any) -> None:
    """Before a save writes anything.

    Raises:
        CheckpointWriteError: it cannot fit on the disk.
    """
    needed = disk_space.weights_bytes(model) + (0 if args.save_only_model else disk_space.optimizer_bytes(optimizer))
    disk_space.check_free_space(folder, needed, what="The next checkpoint")


def rotate(store: CheckpointStore, args: Any, *, run_id: str, newest: int, best: int | None) -> None:
    """Deletes what the arguments no longer want of this run's checkpoints; `newest` was just written."""
    plan = resolve.checkpoint(args)
    if plan.keep_last is None:
        return
    keep = Keep(last=plan.keep_last, every_steps=plan.keep_every_steps, every_s=plan.keep_every_s)
    for step in to_remove(written_by(store, run_id), keep, newest=newest, best=best):
        store.remove(step)


def written_by(store: CheckpointStore, run_id: str) -> list[Saved]:
    """The checkpoints of a run."""
    manifests = ((step, Manifest.read(store.path(step))) for step in store.steps())
    return [Saved(step, m.written_at) for step, m in manifests if m is not None and m.run_id == run_id]


def write_state(state: Any, stateful: list[Any], folder: Path) -> None:
    state.stateful_callbacks = collect_states(stateful)
    state.save_to_json(folder / TRAINER_STATE_NAME)
