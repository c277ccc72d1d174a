"""Checkpointer: the contents of a checkpoint, in one list; writing and reading them; deleting older checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainwright._types import (
    DATA_POSITION_NAME,
    EXTENSIONS_NAME,
    MANIFEST_NAME,
    TRAINER_STATE_NAME,
    Model,
    StateDict,
)
from trainwright.callbacks.base import overrides
from trainwright.callbacks.dispatch import is_own_callback
from trainwright.checkpoint import async_writer, rng, training_state
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest, find_problem
from trainwright.checkpoint.optimizer_check import check_loaded_state, find_nan
from trainwright.checkpoint.store import CheckpointStore, Keep, Saved, WeightCheck, milestones, to_remove
from trainwright.config import resolve
from trainwright.config.fields import get_value
from trainwright.data.prepared_dataloader import map_tensors
from trainwright.engine.base import Engine
from trainwright.errors import ArgumentError, CheckpointNotFoundError, NonFiniteWeightsError
from trainwright.run import checks
from trainwright.run.run import Run
from trainwright.state.trainer_state import collect_states
from trainwright.support.hooks import SaveHooks, is_overridden
from trainwright.support.replaced import current
from trainwright.support.tensor_tree import has_finite_values

logger = logging.getLogger(__name__)


def collect_extension_states(run: Run) -> dict[str, StateDict]:
    """Returns the states of a run's extensions by name; ArgumentError for a state that a checkpoint cannot store."""
    states = run.extensions.saving.states()
    for name, state in states.items():
        training_state.check_plain_state(state, f"state_dict() of the extension {name!r}")
    return states


class Part(NamedTuple):
    """One part of a checkpoint."""

    # writes it into a folder; gets the checkpointer, the hooks, the run and the folder
    write: Callable[[Checkpointer, SaveHooks, Run, Path], None]
    is_for_resume: bool = False  # not needed if only weights are saved (`save_only_model`)


CONTENTS = (
    # weights, config, processing class, arguments
    Part(lambda c, hooks, run, to: hooks.save_model(str(to), _internal_call=True)),
    Part(lambda c, hooks, run, to: c.form.write_shards(c, hooks.optimizer, to)),  # for a sharded model
    Part(lambda c, hooks, run, to: hooks._save_optimizer_and_scheduler(str(to)), True),
    Part(lambda c, hooks, run, to: c.write_groups(hooks, run, to), True),  # if the optimizer got others in the run
    Part(lambda c, hooks, run, to: hooks._save_scaler(str(to)), True),  # loss scale (fp16)
    Part(lambda c, hooks, run, to: hooks._save_rng_state(str(to)), True),  # and the position in the data
    Part(lambda c, hooks, run, to: c.write_extensions(run, to), True),
    Part(lambda c, hooks, run, to: c.write_state(hooks, run, to)),  # record of the run, states of callbacks
)  # the store adds the manifest last: sizes, digests, the cursor

# Methods in which a user's code may read the files of a save, or expect them on return.
SAVING_HOOKS = (
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_push_from_checkpoint",
)

# Methods with overrides that continue after a checkpoint is on disk.
HOOKS_AFTER_A_SAVE = ("_maybe_log_save_evaluate", "_save_checkpoint", "_push_from_checkpoint")


def may_change_checkpoints(hooks: SaveHooks) -> bool:
    """Returns whether user code runs after a checkpoint is written, and may change its files."""
    if is_overridden(hooks, *HOOKS_AFTER_A_SAVE):
        return True
    callbacks = [one for one in hooks.callback_handler.callbacks if not is_own_callback(one)]
    return any(overrides(one, "on_save") and getattr(one, "looks_at_files", True) for one in callbacks)


def no_value(folder: Path) -> None:
    """Finds nothing: only the weights are checked."""


class WholeForm:
    """Weights and optimizer as a single process has them, in one file each; there are no shards."""

    def weights(self, engine: Engine, model: Model) -> Mapping[str, Any] | None:
        """Returns all weights in the main process if they are distributed; else None: the model has them itself."""
        return engine.whole_weights(model)

    def pieces(self, folder: Path) -> tuple[()]:
        """Returns nothing: there are no shards."""
        return ()

    def optimizer_pieces(self, folder: Path) -> tuple[()]:
        """Returns nothing: the optimizer has its own file."""
        return ()

    def write_shards(self, checkpointer: Checkpointer, optimizer: Any, folder: Path) -> None: ...

    def write_optimizer(self, checkpointer: Checkpointer, optimizer: Any, folder: Path) -> None:
        """Writes the file of the optimizer."""
        state = checkpointer.engine.optimizer_state(optimizer)
        if checkpointer.args.should_save:
            writer = checkpointer.writer
            is_tested = resolve.nonfinite_policy(checkpointer.args) != "ignore"
            training_state.save_optimizer(state, folder, sink=writer.sink, tested=writer.tested if is_tested else None)


class ShardedForm:
    """Weights and optimizer in shards, each written by its own process; there are no full files."""

    def weights(self, engine: Engine, model: Model) -> Mapping[str, Any]:
        return {}

    def pieces(self, folder: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Reads the shards of all processes back."""
        from trainwright.engine import sharded_state

        return sharded_state.weights_in(folder)

    def optimizer_pieces(self, folder: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Reads the shards of the optimizer back."""
        from trainwright.engine import sharded_state

        return sharded_state.optimizer_in(folder)

    def write_shards(self, checkpointer: Checkpointer, optimizer: Any, folder: Path) -> None:
        """Writes the shards of this process."""
        optimizer = None if checkpointer.args.save_only_model else optimizer
        checkpointer.engine.save_parts(folder, optimizer, put=checkpointer.writer.sink.put)

    def write_optimizer(self, checkpointer: Checkpointer, optimizer: Any, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpointer:
    """Writes and reads the checkpoints of a run."""

    args: Any  # the settings: the parts to save, the number of checkpoints to keep
    engine: Engine  # provides weights and states as a single process would have them
    writer: CheckpointWriter  # writes synchronously or asynchronously

    # -- writing -------------------------------------------------------------------------------------------------------

    def save(self, hooks: SaveHooks, run: Run, store: CheckpointStore, *, asynchronous: bool) -> None:
        """Writes `checkpoint-<step>` of a run atomically, then deletes old checkpoints beyond `save_total_limit`.

        `hooks` write the parts; an override controls its part. `asynchronous` returns before the files exist.
        Raises CheckpointWriteError if it cannot be written, and `save_failure` is "stop".
        """
        run.extensions.settle_all()
        for before_save in run.extensions.saving.before_save:
            before_save(run)
        step = run.progress.state.global_step
        is_within_step = run.progress.step_under_way and run.progress.window.start is not None
        if is_within_step and self.args.should_save:
            logger.warning(
                "checkpoint-%d is saved within step %d, so a resume from it may end with other weights. To save a "
                "finished step, set control.should_save=True, or save in on_step_end.",
                step,
                step + 1,
            )
        best = run.progress.state.best_global_step
        manifest = Manifest(step=step, run_id=run.run_id, world_size=self.args.world_size, cursor=run.cursor())

        def check() -> None:
            """Checks before writing that the directory is this run's, and that the checkpoint fits on the disk."""
            for check_save in run.extensions.saving.check_save:
                check_save()
            of_optimizer = 0 if self.args.save_only_model else async_writer.optimizer_bytes(hooks.optimizer)
            needed = async_writer.weights_bytes(hooks.model) + of_optimizer
            async_writer.check_free_space(store.root, needed, what="The next checkpoint")

        def write(folder: Path) -> None:
            self.writer.tested.clear()
            for part in CONTENTS:
                if not (part.is_for_resume and self.args.save_only_model):
                    part.write(self, hooks, run, folder)
            if is_overridden(hooks, *SAVING_HOOKS):
                # An override may have changed what is written by now, so it is read back.
                self.writer.tested.clear()

        def committed() -> None:
            for tell in run.extensions.saving.committed:
                tell(store.path(step))

        self.writer.save(
            store,
            manifest,
            ranks=self.engine,
            writes=self.args.should_save,
            in_background=asynchronous,
            check=check,
            write=write,
            after=lambda: rotate(
                store,
                self.args,
                run_id=manifest.run_id,
                newest=step,
                best=best,
                kept=run.extensions.saving.kept_steps(),
            ),
            may_be_changed=may_change_checkpoints(hooks),
            committed=committed,
        )

    def store(self, folder: str, model: Any) -> CheckpointStore:
        """Returns the store for a directory; it refuses non-finite weights unless such steps are ignored."""
        buffers = frozenset(name for name, _ in self.engine.unwrap(model).named_buffers())
        policy = resolve.nonfinite_policy(self.args)
        find_in_optimizer = partial(find_nan, shards=self.form.optimizer_pieces, tested=self.writer.tested)
        check = WeightCheck(
            is_strict=policy != "ignore",
            refuses_first=policy in ("skip", "rollback", "stop"),
            buffers=buffers,
            shards=self.form.pieces,
            find_beside=no_value if policy == "ignore" else find_in_optimizer,
        )
        return CheckpointStore(folder, weights=check)

    def may_be_asynchronous(self, hooks: SaveHooks, run: Run) -> bool:
        """Returns whether a save may return before its files exist: not if user code may read them."""
        wanted = get_value(self.args, "save_async")
        if wanted is False or run.progress.is_interrupted or not run.is_training:
            return False
        looks = is_overridden(hooks, *SAVING_HOOKS) or hooks.callback_handler.looks_at_saves()
        return wanted is True or not looks

    @property
    def form(self) -> WholeForm | ShardedForm:
        """Returns the form in which the engine's model and optimizer are written."""
        return ShardedForm() if self.engine.writes_parts else WholeForm()

    def write_state(self, hooks: SaveHooks, run: Run, folder: Path) -> None:
        """Writes the record of the run, with the current path of the best checkpoint, and the states of callbacks."""
        state = run.progress.state
        store = CheckpointStore(folder.parent)
        best = state.best_global_step
        if best is not None and self.engine.agree(
            lambda: best == state.global_step or best in store.owned_by(run.run_id)
        ):
            state.best_model_checkpoint = str(store.path(best))
        if self.args.should_save:
            state.stateful_callbacks = collect_states(stateful(hooks.callback_handler, run.progress.control))
            parts = run.progress.evaluation.state(run.progress.control)
            if parts is not None:
                control = state.stateful_callbacks.setdefault("TrainerControl", {"args": {}, "attributes": {}})
                control["attributes"]["evaluation"] = parts
            state.save_to_json(folder / TRAINER_STATE_NAME)

    def write_extensions(self, run: Run, folder: Path) -> None:
        """Writes the files and states of the extensions."""
        for save in run.extensions.saving.save:
            save(folder, self.writer.sink)
        states = collect_extension_states(run)
        if not states:
            return
        if self.engine.num_replicas > 1:  # they are sent to the writing process
            states = map_tensors(lambda tensor: tensor.detach().cpu(), states)
        every = self.engine.gather_replica_objects(states)

        def write(copied: list[dict[str, StateDict]]) -> None:
            for rank, one in enumerate(copied):
                torch.save(one, folder / rng.file_name(rank, len(copied), EXTENSIONS_NAME))

        if self.args.should_save:
            self.writer.sink.put(every, write)

    def write_groups(self, hooks: SaveHooks, run: Run, folder: Path) -> None:
        """Writes the names of the optimizer's parameters if it has groups that it was not made with."""
        groups = getattr(hooks.optimizer, "param_groups", ())
        if self.args.should_save and (run.has_added_groups or len(groups) != run.progress.groups.num):
            from trainwright.run import late_parameters

            late_parameters.save_groups(self.engine.unwrap(hooks.model), hooks.optimizer, folder)

    def read_extensions(self, run: Run, checkpoint: Checkpoint) -> None:
        """Restores the extensions from `write_extensions`; a replica without a file uses that of the first replica."""
        for load in run.extensions.saving.load:
            load(checkpoint)
        run.extensions.saving.load_states(checkpoint.extension_states(self.engine.replica, self.engine.num_replicas))

    def weights_to_save(self, model: Model, *, is_checkpoint: bool) -> dict[str, Any] | None:
        """Returns all weights in the main process if they are distributed; empty if shards are written; else None."""
        whole = self.form.weights(self.engine, model) if is_checkpoint else self.engine.finished_weights(model)
        return None if whole is None else dict(whole)

    def write_model(self, model: Model, processing_class: Any, folder: Path, state_dict: dict[str, Any] | None) -> None:
        """Writes the model for `from_pretrained`, the processing class and the arguments."""
        from trainwright.checkpoint import weights

        weights.save_weights(
            self.engine.unwrap(model),
            folder,
            state_dict=state_dict,
            sink=self.writer.sink,
            as_safetensors=get_value(self.args, "save_safetensors"),
        )
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        training_state.save_arguments(self.args, folder)

    def write_random_states(self, run: Run, folder: Path) -> None:
        """Writes random states and data positions of each process into its own file; the writing process writes them.

        Processes that work on the same batches draw the same numbers, so they share one file.
        """
        of_loader, position = run.loader_states()
        every = self.engine.gather_replica_objects((rng.capture() | of_loader, position))

        def write(nothing: Any) -> None:
            for rank, (states, where) in enumerate(every):
                rng.save(folder / rng.file_name(rank, len(every)), states)
                if where is not None:
                    torch.save(where, folder / rng.file_name(rank, len(every), DATA_POSITION_NAME))

        if self.args.should_save:
            # these states do not change, so they are not copied; writing them takes a while
            self.writer.sink.put((), write)

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_weights(self, model: Model, checkpoint: Checkpoint) -> Any:
        """Loads the weights of a checkpoint; returns the keys that did not match."""
        from trainwright.engine import sharded_state

        return checkpoint.load_weights(model, shards=sharded_state, load=self.engine.load_weights)

    def check_finite(self, model: Model, checkpoint: Checkpoint) -> None:
        """Checks weights that were read from a checkpoint, before a step is lost to them; all processes call it.

        Raises NonFiniteWeightsError for trained weights that are not finite, with the newest older checkpoint whose
        weights are; with `on_nonfinite="warn"` that is a warning.
        """
        policy = resolve.nonfinite_policy(self.args)
        if policy == "ignore":
            return
        named = ((name, one) for name, one in model.named_parameters() if one.requires_grad)
        bad = next((name for name, one in named if not has_finite_values(one)), None)
        everybodys = self.engine.gather_objects(bad) if self.engine.num_processes > 1 else [bad]
        name = next((one for one in everybodys if one is not None), None)
        if name is None:
            return
        older = self.engine.agree(lambda: self._find_finite_before(model, checkpoint))
        cure = (
            f"Resume from {older}, the newest one before it with finite weights"
            if older is not None
            else "No older checkpoint beside it has finite weights: begin a new run"
        )
        message = f"The weights in {checkpoint} are not finite: {name}. {cure}"
        if policy != "warn":
            raise NonFiniteWeightsError(f"{message}; on_nonfinite='ignore' uses such weights.")
        logger.warning("%s.", message)

    def _find_finite_before(self, model: Model, checkpoint: Checkpoint) -> str | None:
        """Returns the newest older checkpoint in the same directory that is intact and has finite weights."""
        from trainwright.engine import sharded_state

        buffers = frozenset(name for name, _ in model.named_buffers())
        check = WeightCheck(buffers=buffers, shards=sharded_state.weights_in)
        store = CheckpointStore(checkpoint.path.parent)
        step = checkpoint.state.global_step
        for path in (store.path(one) for one in reversed(store.steps()) if one < step):
            older = Checkpoint(path)
            if older.non_finite_mark is None and older.find_problem() is None and check.find(path) is None:
                return str(path)
        return None

    def read_states(self, model: Model, optimizer: Any, scheduler: Any, checkpoint: Checkpoint) -> None:
        """Loads the states of the optimizer and the schedule."""
        from trainwright.engine import sharded_state
        from trainwright.run import late_parameters

        folder = checkpoint.path
        late_parameters.restore_groups(self.engine.unwrap(model), optimizer, scheduler, folder)
        if sharded_state.has_optimizer(folder):
            sharded_state.load_optimizer(folder, model, optimizer)
        else:
            training_state.load_optimizer(
                optimizer, folder, load=self.engine.load_optimizer_state, holds_parts=self.engine.holds_parts
            )
        if not self.engine.holds_parts and (folder / TRAINER_STATE_NAME).is_file():
            check_loaded_state(
                optimizer,
                folder,
                num_steps=checkpoint.state.global_step,
                count_skipped=checkpoint.count_skipped_steps,
                names={parameter: name for name, parameter in self.engine.unwrap(model).named_parameters()},
            )
        training_state.load_scheduler(scheduler, folder)

    def load_newest(self, hooks: Any, folder: str, run: Run) -> int:  # Any: the trainer, whose hooks load
        """Loads weights, optimizer and schedule of a run's newest valid checkpoint, and returns its step.

        If the run has none in `folder` yet, the checkpoint that it resumed from is used; CheckpointNotFoundError if
        there is none. `hooks` read the parts; an override controls its part. All processes must call it.
        """
        self.writer.wait()
        store = CheckpointStore(folder)

        def newest() -> str:
            own = sorted(store.owned_by(run.run_id) - store.non_finite(), reverse=True)
            folders = [store.path(step) for step in own]
            if run.resumed.checkpoint is not None:
                folders.append(run.resumed.checkpoint.path)
            found = next((path for path in folders if find_problem(path) is None), None)
            if found is None:
                raise CheckpointNotFoundError(
                    f"A bad step must be rolled back (rollback_every=0), but this run has no checkpoint in {folder} "
                    "yet. Save earlier, or set rollback_every above 0 for snapshots in memory."
                )
            return str(found)

        path = self.engine.agree(newest)
        hooks._load_from_checkpoint(path)
        hooks._load_optimizer_and_scheduler(path)
        return Checkpoint(path).state.global_step


def stateful(handler: Any, control: Any) -> list[Any]:
    """Returns the callbacks, and the control, that have a state to save."""
    return [part for part in (*handler.callbacks, control) if callable(getattr(part, "state", None))]


def log_load_result(load_result: Any) -> None:
    """Logs the weights that a checkpoint lacks, and its unexpected ones."""
    missing = ", ".join(load_result.missing_keys)
    unexpected = ", ".join(load_result.unexpected_keys)
    if missing:
        logger.warning("The checkpoint lacks weights of the model; they keep their current values: %s.", missing)
    if unexpected:
        logger.warning("The checkpoint has weights that the model lacks; they are ignored: %s.", unexpected)


def find_best(state: Any, folder: str) -> str | None:
    """Returns the best checkpoint if an override of `_save_checkpoint` wrote it and did not name it in the record.

    None, with a warning, if there is no directory with weights of the best step.
    """
    from trainwright.checkpoint import weights

    path = CheckpointStore(folder).path(state.best_global_step)
    if path.is_dir() and (weights.weight_files(path) or any((path / name).is_file() for name in weights.ADAPTER_FILES)):
        return str(path)
    logger.warning(
        "load_best_model_at_end=True, but %s has no weights: an override saves elsewhere, or not at each evaluation. "
        "The model keeps the last weights. Save to that directory, or set state.best_model_checkpoint to another one.",
        path,
    )
    return None


def has_weights_alone(folder: Path) -> bool:
    """Returns whether a directory has a model's weights, but is no checkpoint that a run could continue."""
    from trainwright.checkpoint import weights

    is_checkpoint = any((folder / name).exists() for name in (MANIFEST_NAME, TRAINER_STATE_NAME))
    has_adapter = any((folder / name).is_file() for name in weights.ADAPTER_FILES)
    return not is_checkpoint and (has_adapter or bool(weights.weight_files(folder)))


def best_to_load(state: Any, args: Any, run_id: str) -> Path | None:
    """Returns the best checkpoint with unchanged files; None if it was deleted, or none is left.

    If it was altered, the run's checkpoint with the next best metric in the record's log takes its place.
    """
    best = Path(state.best_model_checkpoint)
    if not best.is_dir():
        logger.warning("The best model, %s, was deleted meanwhile; the model keeps the last weights.", best)
        return None
    store = CheckpointStore(best.parent)
    ranked = checks.ranked_steps(
        args.metric_for_best_model, state.log_history, is_greater_better=args.greater_is_better
    )
    own = store.owned_by(run_id)
    others = [store.path(step) for step in ranked if step in own and store.path(step) != best]
    for folder in (best, *others):
        problem = None if has_weights_alone(folder) else find_problem(folder)
        if problem is None:
            logger.info("Loading the best model, %s (best: %s).", folder, state.best_metric)
            return folder
        logger.error("The best model, %s, is not loaded: %s. The next best one takes its place.", folder, problem)
    logger.error("No checkpoint with an evaluation is intact; the model keeps the last weights.")
    return None


# -- the output folder ------------------------------------------------------------------------------------------------


def prepare_output(args: Any, folder: str, *, is_fresh: bool) -> None:
    """Handles an earlier run's checkpoints in the output directory; with `overwrite_output_dir=False`, by an error."""
    import safetensors.torch  # noqa: F401 -- so that a save, hours later, is not the first to import it

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
        "%s. This run starts from scratch and replaces checkpoints of the same step. Resume with "
        "resume_from_checkpoint=True, or delete them with overwrite_output_dir=True.",
        found,
    )


def check_first_checkpoint(args: Any, folder: str, model: Model) -> None:
    """Warns before step 1 if the first checkpoint may not fit on the disk; raises if not even its weights do."""
    if args.save_strategy == "no":
        return
    root = Path(folder)
    what = "A checkpoint"
    surely = async_writer.weights_bytes(model)
    likely = surely + (0 if args.save_only_model else async_writer.estimated_optimizer_bytes(model))
    free = async_writer.free_bytes(root)
    if free is None or free >= likely:
        return
    if free < surely and get_value(args, "save_failure") == "stop":
        async_writer.check_free_space(root, surely, what=what)
    what = f"{what}, estimated with its optimizer,"
    logger.warning("%s", async_writer.shortage_message(root, likely, free, what=what))


def rotate(
    store: CheckpointStore, args: Any, *, run_id: str, newest: int, best: int | None, kept: Collection[int] = ()
) -> None:
    """Deletes this run's checkpoints that the arguments no longer keep; `newest` was just written, `kept` stay."""
    plan = resolve.checkpoint(args)
    replacement: Any = current("rotate_checkpoints", None)
    if replacement is not None:
        best_path = None if best is None else str(store.path(best))
        limit = plan.keep_last
        replacement(str(store.root), save_total_limit=limit, best_model_checkpoint=best_path, use_mtime=True)
        return
    if plan.keep_last is not None:
        keep = Keep(last=plan.keep_last, every_steps=plan.keep_every_steps, every_s=plan.keep_every_s)
        for step in to_remove(written_by(store, run_id), keep, newest=newest, best=best).difference(kept):
            store.remove(step)


def rotate_anew(folder: str, args: Any, run: Run) -> None:
    """Deletes the checkpoints that a run no longer wants, when none was just written."""
    store = CheckpointStore(folder)
    steps = store.owned_by(run.run_id)
    if steps and args.should_save:
        best = run.progress.state.best_global_step
        rotate(store, args, run_id=run.run_id, newest=max(steps), best=best, kept=run.extensions.saving.kept_steps())


def keep_only_best(store: CheckpointStore, args: Any, run: Run) -> None:
    """At the end of a run with `save_total_limit=1`, deletes its other checkpoints except milestones.

    A run stopped by its time limit is not finished: the checkpoints for resuming it stay.
    """
    plan = resolve.checkpoint(args)
    state = run.progress.state
    best = state.best_global_step
    is_cut_off = plan.max_train_s is not None and state.global_step < state.max_steps
    if plan.keep_last != 1 or is_cut_off or best is None or not store.path(best).is_dir():
        return
    written = written_by(store, run.run_id)
    keep = Keep(last=1, every_steps=plan.keep_every_steps, every_s=plan.keep_every_s)
    for step in {one.step for one in written} - {best} - milestones(written, keep):
        store.remove(step)


def written_by(store: CheckpointStore, run_id: str) -> list[Saved]:
    """Returns the checkpoints of a run except any with non-finite weights, which must not displace good ones."""
    bad = store.non_finite()
    finite = (step for step in store.steps() if step not in bad)
    manifests = ((step, Manifest.read(store.path(step))) for step in finite)
    return [Saved(step, m.written_at) for step, m in manifests if m is not None and m.run_id == run_id]
