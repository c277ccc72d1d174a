"""From a checkpoint back to a run: finds, verifies and loads it, and lists the settings that differ."""

from __future__ import annotations

import copy
import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright._types import DatasetLike, JSONObject, counted
from trainwright.capability import Copies, Origin
from trainwright.capability_table import MADE
from trainwright.checkpoint import rng
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.store import CheckpointStore, verified
from trainwright.config.behaviour import get_behaviour
from trainwright.config.coerce import output_path
from trainwright.config.fields import get_value
from trainwright.config.plans import OPEN_END, StepPlan
from trainwright.data.cursor import Cursor, LoaderState, WindowSize, plan_resume
from trainwright.data.loader import Loader
from trainwright.data.seeding import seed_from
from trainwright.engine.base import Engine
from trainwright.errors import ArgumentError, CheckpointError, CheckpointNotFoundError, TrainwrightError
from trainwright.optim import schedules
from trainwright.state.trainer_state import TrainerState
from trainwright.support.replaced import current

if TYPE_CHECKING:
    from trainwright.config.summary import SettingDifference

logger = logging.getLogger(__name__)


# -- which checkpoint -------------------------------------------------------------------------------------------------


def open_checkpoint(asked: str | bool | None, args: Any, engine: Engine) -> Checkpoint | None:
    """Opens the checkpoint to begin from in all processes; the main process chooses and verifies it.

    `asked` and errors are the same as for `find_checkpoint`; directory, copies and disks are as in the arguments. A
    run with an `Origin` for which no other checkpoint is asked begins from there until it has one of its own;
    `asked=False` begins it again.
    """
    origin = find_origin(args) if asked in (None, False, "auto") else None
    if origin is not None:
        asked = False if asked is False else "auto"
    elif asked is None or asked is False:
        return None
    copies = find_copies(args, asked, engine)
    if origin is not None:
        origin.check()
    of_all: Checkpoint | None = None
    if copies is not None:
        of_all = find_checkpoint(asked, output_path(args), copies=copies)
        if origin is None:
            return of_all
    found: list[Checkpoint] = []

    def choose() -> tuple[Path, bool] | None:
        checkpoint = of_all if copies is not None else find_checkpoint(asked, output_path(args))
        if origin is not None:
            checkpoint = origin.begin_or_continue(checkpoint)
        if checkpoint is None:
            return None
        found.append(checkpoint)
        return checkpoint.path, checkpoint.path.parent == Path(output_path(args))

    chosen = engine.agree(choose)
    if chosen is None:
        return None
    path, is_in_output_dir = chosen
    if is_in_output_dir:
        path = Path(output_path(args)) / path.name  # which may have another name on the disk of another node
    return found[0] if found else Checkpoint(path)


def find_checkpoint(asked: str | bool | None, output_dir: str, *, copies: Copies | None = None) -> Checkpoint | None:
    """Returns the checkpoint to resume from: the newest complete one for True and "auto", or the named one.

    A checkpoint of `copies` is downloaded into `output_dir`, by all processes, which all call this. Raises
    CheckpointNotFoundError if there is none, except for "auto"; CheckpointError if the named one is damaged, or if the
    copies cannot be read and there is none here.
    """
    if asked is None or asked is False:
        return None
    store = CheckpointStore(output_dir)
    find_last: Any = current("get_last_checkpoint", None)
    if copies is not None:
        latest = copies.fetch(store, why_not=find_unreadable)
    elif asked is not True and asked != "auto":
        return verified(Path(asked).absolute())
    elif find_last is not None:
        named = find_last(output_dir)
        latest = None if named is None else verified(named)
    else:
        latest = store.latest(lambda found: found.find_problem() or find_unreadable(found))
    if latest is None and asked == "auto":
        return None
    if latest is None:
        beside = "" if copies is None else f" or at {copies.place}"
        raise CheckpointNotFoundError(
            f"No valid checkpoint found in output directory ({output_dir}){beside}: resume_from_checkpoint=True, but "
            f"there is no complete checkpoint{_describe_marked(store)}. Start without it, or name the directory of a "
            "checkpoint."
        )
    return latest


def _describe_marked(store: CheckpointStore) -> str:
    """Returns which checkpoints have values that are not finite, as an addition to a sentence; "" if none."""
    paths = [store.path(step) for step in sorted(store.non_finite())]
    marks = [f"{path.name}, in which {Checkpoint(path).non_finite_mark}" for path in paths]
    return f" but {', and '.join(marks)}" if marks else ""


def find_copies(args: Any, asked: str | bool, engine: Engine) -> Copies | None:
    """Returns where else the checkpoint that is `asked` for may be; None: in a directory alone."""
    makers = (make for row in MADE if (make := row.load().copies) is not None)
    return next((found for make in makers if (found := make(args, asked, engine)) is not None), None)


def find_origin(args: Any) -> Origin | None:
    """Returns the checkpoint of another run from which a run begins until it has its own; None: it begins afresh."""
    found = (capability.origin(args) for row in MADE if (capability := row.load()).origin is not None)
    return next((origin for origin in found if origin is not None), None)


def check_cooldown(checkpoint: Checkpoint | None, args: Any) -> None:
    """Raises ArgumentError for a cooldown of a run that begins afresh: there is no rate to begin at."""
    cooldown = get_value(args, "cooldown")
    if checkpoint is None and cooldown is not None:
        raise ArgumentError(
            f"cooldown={cooldown!r} begins at the rate of a checkpoint, and this run begins afresh. Pass branch_from "
            "or resume_from_checkpoint, or for a whole run lr_scheduler_type='warmup_stable_decay'."
        )


def find_unreadable(checkpoint: Checkpoint) -> str | None:
    """Returns why a checkpoint cannot be resumed from, judged by its tensor descriptions; None if nothing is wrong."""
    try:
        _ = checkpoint.state
        if checkpoint.cursor is not None:
            Cursor.from_dict(checkpoint.cursor)
        checkpoint.check_readable()
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def check_same_checkpoint(checkpoint: Checkpoint | None, engine: Engine, *, on_each_node: bool) -> None:
    """Raises CheckpointError if some process sees a different checkpoint, or none, under the chosen path.

    With `on_each_node` each node wrote a checkpoint of its own, so all nodes' checkpoints of a step are the same.
    """
    if checkpoint is None or engine.num_processes == 1:
        return
    manifest = checkpoint.manifest
    identity: Any = checkpoint.identity
    if on_each_node and manifest is not None:
        identity = (manifest.run_id, manifest.step)
    seen = engine.gather_objects(identity)
    others = [str(rank) for rank, identity in enumerate(seen) if identity != seen[0]]
    if others:
        raise CheckpointError(
            f"{checkpoint} is not the same checkpoint for all processes: process {', '.join(others)} sees another one, "
            "or none, at the path used by process 0. Put it on a disk shared by all nodes, or copy it to each of them."
        )


def run_id_after(
    checkpoint: Checkpoint | None, output_dir: str, *, copies: Copies | None = None, is_branch: bool = False
) -> str:
    """Returns the run id for new checkpoints: a resume keeps its checkpoint's id, a new branch does not.

    A resume from a step before an intact later checkpoint of that run, in the directory or among its copies, gets a
    new id, since both runs have checkpoints of these steps.
    """
    manifest = None if checkpoint is None else checkpoint.manifest
    if manifest is None or is_branch:
        return new_run_id()
    store = CheckpointStore(output_dir)
    ahead = [
        step
        for step in store.steps()
        if step > manifest.step and _is_whole_in_run(manifest.run_id, Checkpoint(store.path(step)))
    ]
    if copies is not None and not ahead:
        ahead = copies.find_steps_after(manifest)
    if not ahead:
        return manifest.run_id
    logger.warning(
        "Resuming from step %d leaves later checkpoints behind (step %s). They stay until this run reaches those "
        "steps, and resume_from_checkpoint=True uses the checkpoints of this run.",
        manifest.step,
        ", ".join(map(str, ahead)),
    )
    return new_run_id()


def _is_whole_in_run(run_id: str, checkpoint: Checkpoint) -> bool:
    is_of_run = checkpoint.manifest is not None and checkpoint.manifest.run_id == run_id
    return is_of_run and checkpoint.find_problem() is None


def new_run_id() -> str:
    """Returns a new run id."""
    return uuid.uuid4().hex


# -- the record -------------------------------------------------------------------------------------------------------


def initial_state(checkpoint: Checkpoint | None, stateful: list[Any]) -> TrainerState:
    """Returns a new record, or a copy of a checkpoint's."""
    if checkpoint is None:
        return current("TrainerState", TrainerState)(stateful_callbacks=stateful)
    saved = checkpoint.state
    return replace(
        saved,
        best_model_checkpoint=find_best(saved, checkpoint.path.parent),
        log_history=[*saved.log_history],
        stateful_callbacks=copy.deepcopy(saved.stateful_callbacks),
        trial_params=copy.deepcopy(saved.trial_params),
    )


def choose_batch_size(checkpoint: Checkpoint, args: Any, batch_size: int) -> int:
    """Returns the micro-batch size: with `auto_find_batch_size` that of the checkpoint, else `batch_size`."""
    found = checkpoint.state.train_batch_size if args.auto_find_batch_size else None
    if not found or found == batch_size:
        return batch_size
    logger.info("auto_find_batch_size: batches of %d samples as in the checkpoint, instead of %d", found, batch_size)
    return found


def find_best(state: TrainerState, folder: Path) -> str | None:
    """Returns the current path of the best checkpoint, also if all checkpoints were moved together."""
    recorded = state.best_model_checkpoint
    if recorded is None:
        return None
    step = state.best_global_step
    beside = folder / (Path(recorded).name if step is None else CheckpointStore(folder).path(step).name)
    for path in (beside, Path(recorded)):
        if path.is_dir():
            return str(path)
    logger.warning("The best checkpoint so far, %s, is gone; the next better one will replace it.", recorded)
    return None


@dataclass(frozen=True, slots=True)
class PendingActions:
    """Actions that a checkpoint's run was about to take when a signal or a time limit stopped it."""

    evaluates: bool = False  # the evaluation after its last step
    saves: bool = False  # the save that was to follow that evaluation
    # Parts of that evaluation that were reported, in the form of `EvaluationParts.state`.
    parts: JSONObject = field(default_factory=dict)


def pending_actions(checkpoint: Checkpoint | None) -> PendingActions:
    """Reads from the flags and callbacks in a record which actions were due when its checkpoint was written."""
    if checkpoint is None or checkpoint.manifest is None:
        return PendingActions()
    states = checkpoint.state.stateful_callbacks

    def said(name: str, part: str, value: str) -> bool:
        return _entry(states, name, part).get(value) is True

    by_clock = said("TimeLimits", "attributes", "owes_evaluation")
    parts = _entry(states, "TrainerControl", "attributes").get("evaluation")
    evaluates = by_clock or isinstance(parts, dict) or said("TrainerControl", "args", "should_evaluate")
    saves = evaluates and (by_clock or said("TrainerControl", "args", "should_save"))
    return PendingActions(evaluates, saves, parts if isinstance(parts, dict) else {})


def _entry(states: JSONObject, name: str, part: str) -> JSONObject:
    """Returns a part of the state of a callback; empty if there is none."""
    entry = states.get(name)
    inner = entry.get(part) if isinstance(entry, dict) else None
    return inner if isinstance(inner, dict) else {}


def restore_callbacks(states: dict[str, Any], callbacks: Sequence[Any], *, with_settings: bool) -> None:
    """Restores the exported attributes of callbacks and the control, by class, in the order of their list.

    With `with_settings`, also their constructor arguments. A state without a matching callback is reported.
    """
    waiting = {name: list(state) if isinstance(state, list) else [state] for name, state in states.items()}
    for callback in callbacks:
        state = waiting.get(type(callback).__name__)
        if not state or not callable(getattr(callback, "state", None)):
            continue
        saved = state.pop(0)
        now = callback.state()
        if with_settings and (settings := _exported(saved, now, "args")):
            vars(callback).update(vars(type(callback)(**settings)))
        for name, value in _exported(saved, now, "attributes").items():
            setattr(callback, name, value)
    if with_settings and (missing := sorted(set(states) - {type(callback).__name__ for callback in callbacks})):
        logger.warning("The checkpoint has states for callbacks that this trainer lacks: %s.", ", ".join(missing))


def _exported(saved: object, now: Any, part: str) -> dict[str, Any]:
    """Returns the saved values that the callback currently exports in a part: no others are set."""
    values = saved.get(part) if isinstance(saved, dict) else None
    pairs = values.items() if isinstance(values, dict) else ()
    return {name: value for name, value in pairs if name in now.get(part, {})}


# -- the position -----------------------------------------------------------------------------------------------------


def remaining_plan(
    plan: StepPlan, loader: Loader, checkpoint: Checkpoint | None, args: Any, *, chunk: int, dataset: DatasetLike
) -> tuple[StepPlan, str]:
    """Returns the plan of a resumed run, derived from that of a fresh run, and a message about it.

    `chunk` is the number of samples in a batch of all processes, if the loader does not know it; the dataset has all
    its columns. Raises CheckpointError if the batch size of a position in batches is lost, DataError if an order cannot
    be restored.
    """
    manifest = None if checkpoint is None else checkpoint.manifest
    if manifest is None or manifest.cursor is None or not get_behaviour(args).resume_continues_at_data_position:
        return plan, ""
    cursor = Cursor.from_dict(manifest.cursor)
    other = position_in_other_data(cursor, loader, plan, step=manifest.step)
    if other is not None:
        logger.warning("%s", other_data_message(cursor, other, skips=not args.ignore_data_skip))
        return plan, ""
    now = WindowSize(chunk=loader.position.chunk or chunk, micro_batches=plan.micro_batches)
    before = WindowSize.from_checkpoint(manifest.cursor, world_size=manifest.world_size, now=now)
    if args.ignore_data_skip:
        cursor = replace(cursor, samples=0)
    note = loader.position.check_resume(cursor, before=before, now=now, dataset=dataset)
    plan, of_size = plan_resume(
        plan,
        cursor,
        step=manifest.step,
        batches_left=loader.position.batches_left(cursor, plan.batches_per_epoch),
        before=before,
        now=now,
        counts_epochs=args.max_steps <= 0,
    )
    return plan, "; ".join(filter(None, (of_size, note)))


def position_in_other_data(cursor: Cursor, loader: Loader, plan: StepPlan, *, step: int) -> Cursor | None:
    """Returns the position to resume at if the number of samples changed: by the number of steps, as transformers."""
    here = loader.cursor(0, 0, batches_per_epoch=plan.batches_per_epoch)
    is_known = None not in (cursor.num_samples, here.num_samples, loader.position.chunk)
    if not is_known or cursor.num_samples == here.num_samples or (cursor.unit, here.unit) != (None, None):
        return None
    assert here.num_samples is not None
    assert loader.position.chunk is not None
    epoch, steps = divmod(step, plan.steps_per_epoch)
    samples = min(steps * plan.micro_batches * loader.position.chunk, here.num_samples)
    return replace(here, epoch=epoch, samples=samples, seed=cursor.seed)


def other_data_message(before: Cursor, now: Cursor, *, skips: bool) -> str:
    """Describes which samples a resume with a different number of samples skips and repeats."""
    skipped = f"the first {now.samples} of {now.num_samples} samples in its order are skipped, trained or not"
    if not skips or now.samples == 0:
        skipped = "none of its samples is skipped, trained or not"
    how = "" if not skips else "; ignore_data_skip=True skips none"
    return (
        f"The training data had {before.num_samples} samples when the checkpoint was written, {before.samples} of them "
        f"trained in epoch {before.epoch + 1}, but now has {now.num_samples}. Training continues by the number of "
        f"steps, as in transformers, in epoch {now.epoch + 1}; {skipped}. Trained samples among the rest are seen "
        f"again{how}."
    )


def resume_loader(
    loader: Loader, checkpoint: Checkpoint, engine: Engine, plan: StepPlan, *, skips: bool
) -> tuple[int, int] | None:
    """Restores the loader from a checkpoint; returns epoch and batches to skip (if `skips`); None without a cursor."""
    manifest = checkpoint.manifest
    if manifest is None or manifest.cursor is None:
        return None
    cursor = Cursor.from_dict(manifest.cursor)
    other = position_in_other_data(cursor, loader, plan, step=manifest.step)
    if other is not None:
        return loader.resume(other if skips else replace(other, samples=0), LoaderState())
    rank = engine.replica
    num_processes = engine.num_replicas
    # A process without its own uses the first one's: all processes must draw the same order of the epoch.
    states = checkpoint.random_states(rank, num_processes) or checkpoint.first_random_states() or {}
    state = LoaderState(
        position=checkpoint.data_position(rank, num_processes),
        **{field: states.get(name) for field, name in rng.LOADER_STATES.items()},
    )
    if not skips:
        cursor = replace(cursor, samples=0)
        state = replace(state, position=None)
    try:
        return loader.resume(cursor, state)
    except TrainwrightError:
        raise
    except Exception as error:  # an invalid position may raise any error
        raise CheckpointError(f"The position of the data in {checkpoint} cannot be read: {error!r}.") from error


def load_rng(checkpoint: Checkpoint, *, rank: int, num_processes: int, step: int) -> None:
    """Loads random states; a process without any in the checkpoint derives its own from the step and its rank."""
    last = num_processes - 1
    if rank == 0 and last > 0 and not checkpoint.has_random_states(last, num_processes):
        logger.warning(
            "%s has no random states of process %d: fewer processes wrote it. Such processes get states derived from "
            "the step and their rank, so their random draws are new.",
            checkpoint,
            last,
        )
    if checkpoint.restore_random_states(rank, num_processes):
        return
    if rank > 0:
        seed_from((step, rank))
    else:
        logger.warning("%s has no random states: draws will differ from the uninterrupted run's.", checkpoint)


# -- changed settings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointArguments:
    """Facts about the run that wrote a checkpoint."""

    step: int  # at which it was written
    num_steps: int  # its planned length, in optimizer steps
    differences: list[SettingDifference]  # arguments that now have another value


def load_checkpoint_args(checkpoint: Checkpoint, args: Any, *, has_own_optimizer: bool) -> CheckpointArguments:
    """Compares arguments with a checkpoint of ours; CheckpointError for differences that rule out a resume."""
    from trainwright.config.summary import diff_args, impossible_changes

    then = checkpoint.arguments
    now = json.loads(args.to_json_string())
    try:
        found = [] if then is None else diff_args(then, now)
    except RecursionError:  # readable values that are nested too deeply to compare
        found = []
    problems = list(impossible_changes(found, has_own_optimizer=has_own_optimizer))
    if problems:
        raise CheckpointError(f"{checkpoint} cannot be resumed from with these arguments:\n  " + "\n  ".join(problems))
    state = checkpoint.state
    return CheckpointArguments(state.global_step, state.max_steps, found)


def apply_new_settings(
    optimizer: Any,
    scheduler: Any,
    asked: schedules.RequestedSettings,
    then: CheckpointArguments,
    *,
    args: Any,
    num_steps: int,
    is_own: bool,
) -> list[str]:
    """Applies changed settings to the loaded states; returns the changes as lines.

    `asked` are both as made from the arguments, before loading; `is_own` is a schedule that is not ours.
    """
    from trainwright.config.summary import SettingDifference

    if then.num_steps < then.step:
        logger.warning(
            "The record of the checkpoint has max_steps=%d, before its step %d, so how long its run was to last is not "
            "known. The schedule is taken for one of %s, the length of this run.",
            then.num_steps,
            then.step,
            "unknown length" if num_steps == OPEN_END else counted(num_steps, "step"),
        )
        then = replace(then, num_steps=num_steps)
    others = schedules.find_other_rates(optimizer, scheduler)
    changed = {one.name: (one.before, one.now) for one in then.differences}
    lengths = then.num_steps, num_steps
    lines = [str(one) for one in then.differences if (one.name, one.before, one.now) != ("max_steps", *lengths)]
    rate = schedules.changed_rate(optimizer, asked)
    if rate is not None and "learning_rate" not in changed:  # another trainer's checkpoint, or a user's optimizer
        changed["learning_rate"] = rate
        lines.append(str(SettingDifference("learning_rate", *rate)))
    schedules.apply_changes(optimizer, scheduler, asked, changed)
    others = [*schedules.find_unasked_settings(optimizer, scheduler, asked), *others]
    if others and args.should_log:
        logger.warning(
            "The optimizer of the checkpoint has settings that neither the arguments nor the schedule have: %s. The "
            "run uses them, since a callback may have set them. If none did, use another checkpoint, or set them in "
            "on_train_begin.",
            "; ".join(others),
        )
    is_new = not changed.keys().isdisjoint(schedules.SHAPES)
    check_cooldown_alone(get_value(args, "cooldown"), [one for one in then.differences if one.name in schedules.SHAPES])

    if not is_own:
        warn_other_position(scheduler, then)
        length = then.num_steps if num_steps == OPEN_END else num_steps  # without a length, no rate depends on it
        continue_schedule(scheduler, args, before=then.num_steps, now=length, is_new=is_new)
        if length > then.num_steps > 0:
            warn_small_rate(scheduler, args, before=then.num_steps, now=length)
    if num_steps != then.num_steps and then.num_steps > 0 and OPEN_END not in (num_steps, then.num_steps):
        how = "" if is_own or is_new else "; the rate continues from its current value to the new end, without a jump"
        new_length = f"{then.num_steps} -> {counted(num_steps, 'step')}{how}"
        if "num_train_epochs" in changed:  # one line for both
            is_of_epochs = [line.startswith("num_train_epochs ") for line in lines]
            lines[is_of_epochs.index(True)] += f", {new_length}"
        else:
            name = "max_steps" if changed.get("max_steps") == lengths else "length"
            lines.append(f"{name} {new_length}")
    return lines


def warn_other_position(scheduler: Any, then: CheckpointArguments) -> None:
    """Warns if a schedule of ours is at a later step than the run of its checkpoint was."""
    position = getattr(getattr(scheduler, "scheduler", scheduler), "last_epoch", 0)
    if position > then.step:
        logger.warning(
            "The schedule of the checkpoint is at step %d, and its run had made %s. Its rates are used from there on; "
            "if that is not as it was, use another checkpoint.",
            position,
            counted(then.step, "step"),
        )


SMALL_RATE = 0.02  # relative to the base rate


def warn_small_rate(scheduler: Any, args: Any, *, before: int, now: int) -> None:
    """Warns if a longer run continues at a rate near 0, because its schedule had nearly ended, and gives a remedy."""
    rates: list[float] = getattr(scheduler, "get_last_lr", list)()
    bases = getattr(getattr(scheduler, "scheduler", scheduler), "base_lrs", [])
    if not rates or not bases or not bases[0] or rates[0] > SMALL_RATE * bases[0] or not args.should_log:
        return
    logger.warning(
        "The run has %d steps instead of %d, but its schedule had nearly ended: training continues at a learning rate "
        "of %.3g, %.1f %% of %.3g, and will change little. To recompute the schedule for %d steps, pass another "
        "warmup_steps, such as warmup_steps=%d.",
        now,
        before,
        rates[0],
        100 * rates[0] / bases[0],
        bases[0],
        now,
        int(args.get_warmup_steps(now)) + 1,
    )


def continue_schedule(scheduler: Any, args: Any, *, before: int, now: int, is_new: bool = False) -> None:
    """Continues a schedule of ours towards another number of steps without a jump; see `continue_towards`."""
    build = partial(schedules.schedule_for, args)
    cooldown = get_value(args, "cooldown")
    schedules.continue_towards(scheduler, build, before=before, now=now, is_new=is_new, cooldown=cooldown)


def check_cooldown_alone(cooldown: str | None, changed: Sequence[SettingDifference]) -> None:
    """Raises ArgumentError for a cooldown together with another schedule: it begins at the rate of the checkpoint's."""
    if cooldown is None or not changed:
        return
    found = ", ".join(f"{one.name} {one.before!r} -> {one.now!r}" for one in changed)
    raise ArgumentError(
        f"cooldown={cooldown!r} begins at the rate of the checkpoint's schedule, and the arguments change that too: "
        f"{found}. Leave them as they were, or remove cooldown and choose the whole schedule."
    )
