"""From a checkpoint back to a run: which one, at what position, and what it still owes."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright._types import TRAINER_STATE_NAME
from trainwright.assemble.saving import new_run_id, position_name, rng_name, written_by
from trainwright.checkpoint import rng, training_state
from trainwright.checkpoint.manifest import Manifest, find_problem
from trainwright.checkpoint.store import CheckpointStore, verified
from trainwright.config.plans import StepPlan
from trainwright.data.cursor import Cursor, LoaderState, Size, go_on
from trainwright.data.loader import Loader
from trainwright.engine.base import Engine
from trainwright.errors import (
    CheckpointError,
    CheckpointNotFoundError,
)
from trainwright.state.trainer_state import TrainerState

logger = logging.getLogger(__name__)


def find_checkpoint(asked: str | bool | None, output_dir: str) -> str | None:
    """The checkpoint to resume from: the newest complete one for True, the named one if it verifies.

    For "auto" it is the newest complete one too, or none where there is none.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: the named one is damaged.
    """
    if asked is None or asked is False:
        return None
    if asked is not True and asked != "auto":
        return str(verified(asked))
    latest = CheckpointStore(output_dir).latest()
    if latest is None and asked == "auto":
        return None
    if latest is None:
        raise CheckpointNotFoundError(
            f"resume_from_checkpoint=True, but there is no complete checkpoint in output_dir={output_dir!r}. "
            "Start without it, or name the directory of a checkpoint."
        )
    return str(latest)


def manifest_of(checkpoint: str | None) -> Manifest | None:
    return None if checkpoint is None else Manifest.read(Path(checkpoint))


def plan_of_the_rest(
    plan: StepPlan, loader: Loader, checkpoint: str | None, args: Any, *, chunk: int, dataset: Any
) -> tuple[StepPlan, str]:
    """The plan of a run that resumes from a checkpoint, and what there is to say about it.

    Args:
        plan: of a fresh run with these arguments.
        loader: of the training data.
        checkpoint: its directory; None for a fresh run.
        args: the training arguments.
        chunk: samples in a batch of all processes, where the loader does not know.
        dataset: of training samples, with all its columns.

    Raises:
        CheckpointError: the position is counted in batches, and these have another size now.
        DataError: there are more or fewer samples than there were, or they have an order that cannot be made again.
    """
    manifest = manifest_of(checkpoint)
    if manifest is None or manifest.cursor is None:
        return plan, ""
    cursor = Cursor.from_dict(manifest.cursor)
    now = Size(chunk=loader.chunk or chunk, micro_batches=plan.micro_batches)
    before = Size.of_checkpoint(manifest.cursor, world_size=manifest.world_size, now=now)
    if args.ignore_data_skip:
        cursor = replace(cursor, samples=0)
    note = loader.check_resume(cursor, before=before, now=now, dataset=dataset)
    plan, of_size = go_on(
        plan,
        cursor,
        step=manifest.step,
        batches_left=loader.batches_left(cursor, plan.batches_per_epoch),
        before=before,
        now=now,
        counts_epochs=args.max_steps <= 0,
    )
    return plan, "; ".join(filter(None, (of_size, note)))


def check_same_checkpoint(manifest: Manifest | None, checkpoint: str | None, engine: Engine) -> None:
    """Every process must see the same checkpoint under the path that one of them chose.

    Raises:
        CheckpointError: names the processes that see another one, or none.
    """
    if checkpoint is None or engine.num_processes == 1:
        return
    state = Path(checkpoint) / TRAINER_STATE_NAME
    mine = manifest.identity if manifest is not None else zlib.crc32(state.read_bytes()) if state.is_file() else None
    seen = engine.gather_objects(mine)
    others = [str(rank) for rank, identity in enumerate(seen) if identity != seen[0]]
    if others:
        raise CheckpointError(
            f"{checkpoint} is not the same checkpoint for all: process {', '.join(others)} sees another one, or none, "
            "where process 0 has it. Put it on a disk that all nodes share, or copy it whole to each of them."
        )


def resume_loader(
    loader: Loader, checkpoint: str, manifest: Manifest | None, *, rank: int, num_processes: int, skips: bool
) -> tuple[int, int] | None:
    """Gives the loader its state of a checkpoint; returns epoch and batches, or None if the checkpoint has no cursor.

    Args:
        loader: of the training data.
        checkpoint: its directory.
        manifest: of the checkpoint; None if another trainer wrote it.
        rank: of this process, among those with batches of their own.
        num_processes: with batches of their own.
        skips: what is trained of that epoch is not trained again.
    """
    if manifest is None or manifest.cursor is None:
        return None
    folder, cursor = Path(checkpoint), Cursor.from_dict(manifest.cursor)
    own = rng_file(checkpoint, rank=rank, num_processes=num_processes)
    path = own or _of_first(folder, rng_name)  # all processes must draw the same order of the epoch
    states = {} if path is None else rng.load(path)
    state = LoaderState(
        epoch_start=states.get("loader_epoch_start"),
        before_ahead=states.get("loader_before_ahead"),
        position=_data_position(folder, states, rank=rank, num_processes=num_processes, is_own=own is not None),
    )
    if skips:
        return loader.resume(cursor, state)
    return loader.resume(replace(cursor, samples=0), replace(state, position=None))


def _data_position(
    folder: Path, states: dict[str, Any], *, rank: int, num_processes: int, is_own: bool
) -> dict[str, Any]:
    """The position of a stream or of a user's dataloader, by its kind. Older checkpoints have it among random states.

    A process that was not there yet takes the first one's, where that is a stream: all of them read the same items.
    """
    path = _file_of(folder, position_name, rank=rank, num_processes=num_processes)
    if path is not None:
        return training_state.load_data_position(path)
    first = _of_first(folder, position_name)
    if first is not None:
        return {kind: value for kind, value in training_state.load_data_position(first).items() if kind == "stream"}
    own = states.get("loader_own") if is_own else None
    return {kind: value for kind, value in (("stream", states.get("loader_stream")), ("dataloader", own)) if value}


def load_rng(folder: str, path: Path | None, *, rank: int, num_processes: int, step: int) -> None:
    """Loads random states; a process that the checkpoint has none of derives its own from the step and its rank."""
    last = num_processes - 1
    if rank == 0 and last > 0 and not (Path(folder) / rng_name(last, num_processes)).is_file():
        logger.warning(
            "%s has no random states of process %d: fewer processes wrote it. Those without get states derived from "
            "the step and their number, so their random draws are new ones.", folder, last,
        )  # fmt: skip
    if path is not None:
        rng.restore(rng.load(path))
    elif rank > 0:
        rng.derive(step, rank)
    else:
        logger.warning("%s has no random states: draws will differ from the uninterrupted run's.", folder)


def rng_file(folder: str, *, rank: int, num_processes: int) -> Path | None:
    """Where the random states of a process are, also if another number of processes wrote them; None: nowhere."""
    return _file_of(Path(folder), rng_name, rank=rank, num_processes=num_processes)


def _file_of(folder: Path, name: Callable[[int, int], str], *, rank: int, num_processes: int) -> Path | None:
    path = folder / name(rank, num_processes)
    if path.is_file():
        return path
    return _of_first(folder, name) if rank == 0 else None


def _of_first(folder: Path, name: Callable[[int, int], str]) -> Path | None:
    """The file of the first process, of one or of several."""
    return next((path for num in (1, 2) if (path := folder / name(0, num)).is_file()), None)


def run_id_after(checkpoint: str | None, output_dir: str) -> str:
    """Whose checkpoints a run will write: a resume goes on with the run of its checkpoint.

    But one that goes back behind a whole checkpoint of that run begins another: what comes now is not what came then.
    """
    manifest = manifest_of(checkpoint)
    if manifest is None:
        return new_run_id()
    store = CheckpointStore(output_dir)
    later = [one.step for one in written_by(store, manifest.run_id) if one.step > manifest.step]
    ahead = [step for step in later if find_problem(store.path(step)) is None]
    if not ahead:
        return manifest.run_id
    logger.warning(
        "Resuming from step %d leaves later checkpoints behind (steps %s): they stay until this run comes by, and "
        "resume_from_checkpoint=True takes what this run saves.", manifest.step, ", ".join(map(str, ahead)),
    )  # fmt: skip
    return new_run_id()


def owed(state: TrainerState, manifest: Manifest | None) -> tuple[bool, bool]:
    """Whether a checkpoint was written before the evaluation that was due, and whether a save was due after it.

    A signal or a time limit cut it off. The flags and the callbacks that know it are in the record.
    """
    states = state.stateful_callbacks if manifest is not None and isinstance(state.stateful_callbacks, dict) else {}

    def said(name: str, part: str, value: str) -> bool:
        entry = states.get(name)
        inner = entry.get(part) if isinstance(entry, dict) else None
        return isinstance(inner, dict) and inner.get(value) is True

    by_clock = said("TimeLimits", "attributes", "owes_evaluation")
    evaluates = by_clock or said("TrainerControl", "args", "should_evaluate")
    return evaluates, evaluates and (by_clock or said("TrainerControl", "args", "should_save"))


def initial_state(checkpoint: str | None, stateful: list[Any]) -> TrainerState:
    """A fresh record, or the one of a checkpoint."""
    if checkpoint is None:
        return TrainerState(stateful_callbacks=stateful)
    path = Path(checkpoint) / TRAINER_STATE_NAME
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} has no {TRAINER_STATE_NAME}, so its step is not known.")
    try:
        state = TrainerState.load_from_json(path)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Use another checkpoint.") from error
    state.best_model_checkpoint = best_of(state, Path(checkpoint).parent)
    return state


def best_of(state: TrainerState, folder: Path) -> str | None:
    """Where the best checkpoint is now: beside the others, also after all of them were moved together."""
    recorded = state.best_model_checkpoint
    if recorded is None:
        return None
    step = state.best_global_step
    beside = folder / (Path(recorded).name if step is None else CheckpointStore(folder).path(step).name)
    for path in (beside, Path(recorded)):
        if path.is_dir():
            return str(path)
    logger.warning("The best checkpoint so far, %s, is gone; the next better one takes its place.", recorded)
    return None
