"""The composition root: arguments and the user's objects in, working parts out. The only file that knows every wing."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, SequentialSampler

from trainwright import model_facts
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.callbacks.preemption import SlurmRequeue
from trainwright.callbacks.progress import PrinterCallback, ProgressCallback
from trainwright.callbacks.time_limits import TimeLimits
from trainwright.checkpoint import rng, space
from trainwright.checkpoint.manifest import Manifest, find_problem
from trainwright.checkpoint.retention import Keep, Saved, to_remove
from trainwright.checkpoint.store import CheckpointStore, verified
from trainwright.checkpoint.writer import Writer
from trainwright.config import resolve, rules
from trainwright.config.effective import effective_plan
from trainwright.config.plans import OPEN_END, StepPlan
from trainwright.config.resumed import Difference, contradictions, differences
from trainwright.data.apart import find_layout
from trainwright.data.cursor import Cursor, LoaderRandomness
from trainwright.data.groups import formed_order
from trainwright.data.loader import Loader
from trainwright.data.orders import training_order
from trainwright.data.packing import PackedOrder
from trainwright.data.position import Size, check_same_data, go_on
from trainwright.data.rows import RowCollator
from trainwright.data.workers import enable_full_determinism, set_seed
from trainwright.engine.base import Engine
from trainwright.engine.peak import supports_bf16, supports_tf32
from trainwright.engine.select import select_engine
from trainwright.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    LegacyNameWarning,
    ModelError,
    TrainwrightWarning,
)
from trainwright.journal import surroundings, timeline
from trainwright.journal.keeper import JournalKeeper
from trainwright.journal.record import FileJournal, NullJournal
from trainwright.loop.label_smoother import LabelSmoother
from trainwright.loop.loss_scale import LossRule
from trainwright.loop.oom import SmallerBatches
from trainwright.loop.session import Session, Start
from trainwright.optim import continued
from trainwright.optim.named import steps_in_backward
from trainwright.optim.schedules import make_schedule
from trainwright.patches.activations import checkpointed_activations
from trainwright.patches.debug import overflow_detection
from trainwright.patches.liger import apply_liger_kernel
from trainwright.patches.neftune import noisy_embeddings
from trainwright.state.clock import Clock
from trainwright.state.exportable import collect_states
from trainwright.state.run import RunState
from trainwright.state.trainer_state import TrainerState
from trainwright.trackers.table import get_reporting_integration_callbacks
from trainwright.types import RNG_STATE_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_JSON_NAME, has_length

logger = logging.getLogger(__name__)

WITH_OPTIMIZER = 3  # times the weights: two moments of Adam
SLOW_DISK = 100e6  # bytes a second that a save is expected to write before one has been seen


# -- what a trainer is made of --------------------------------------------------------------------------------------


def seed_everything(args: Any) -> None:
    enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)


def make_engine(args: Any) -> Engine:
    return select_engine(resolve.engine(args))


def make_callbacks(
    args: Any, callbacks: Iterable[Any] | None, *, engine: Engine, writer: Writer, **context: Any
) -> CallbackHandler:
    """The handler with the flow, trackers, the user's callbacks, those of the arguments, and what shows progress."""
    trackers = get_reporting_integration_callbacks(args.report_to)
    handler = CallbackHandler([DefaultFlowCallback, *trackers, *(callbacks or ())], **context)
    handler.args = args
    plan = resolve.checkpoint(args)
    if plan.max_train_s is not None or plan.save_every_s is not None:
        guess = num_bytes(context["model"]) * WITH_OPTIMIZER / SLOW_DISK
        handler.add_callback(
            TimeLimits(
                plan.max_train_s,
                plan.save_every_s,
                save_s=lambda: writer.longest_s,
                first_save_s=guess,
                agree=engine.agree,
            )
        )
    if plan.requeues:
        handler.add_callback(SlurmRequeue)
    handler.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
    return handler


def make_keeper(handler: CallbackHandler, clock: Clock) -> JournalKeeper:
    """What keeps the journal: it hears all that the callbacks hear. The clock times both."""
    handler.clock = clock
    keeper = JournalKeeper(clock)
    handler.watch(keeper)
    return keeper


def begin_journal(keeper: JournalKeeper, args: Any, folder: str, run_id: str, *, session: Session, run: RunState,
                  datasets: dict[str, Any]) -> None:  # fmt: skip
    """Opens the journal of a run and writes down what it is. Only the first process writes, where output is saved."""
    journal = FileJournal(folder, run_id) if args.should_save and run.state.is_world_process_zero else NullJournal()
    facts: dict[str, Any] = {}
    if isinstance(journal, FileJournal):
        facts = {
            "arguments": surroundings.arguments(args),
            "changed": surroundings.changed_arguments(args),
            "environment": surroundings.environment(session.engine.device),
            "data": {name: surroundings.data_summary(dataset) for name, dataset in datasets.items()},
            "plan": dataclasses.asdict(session.plan),
        }
    keeper.begin(journal, run.state.global_step, checkpoint=session.start.checkpoint, facts=facts)


def tell_times(args: Any, keeper: JournalKeeper) -> None:
    """Says where the time of a run went, as the plan was said at its start."""
    show_lines(args, timeline.line(keeper.end()).splitlines())


def one_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """The processing class, also under its older name."""
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise ArgumentError("Trainer got processing_class and tokenizer, two names of one thing. Pass only the first.")
    warnings.warn("Trainer(tokenizer=...) is now Trainer(processing_class=...).", LegacyNameWarning, stacklevel=3)
    return tokenizer


def call_model_init(model_init: Callable[..., Any], trial: Any) -> Any:
    """A model from the user's function, which takes nothing or the trial."""
    num_arguments = len(inspect.signature(model_init).parameters)
    if num_arguments > 1:
        raise ModelError(
            f"model_init takes {num_arguments} arguments; it must take none, or one: the trial of a search."
        )
    model = model_init(trial) if num_arguments == 1 else model_init()
    if model is None:
        raise ModelError("model_init returned None; it must return the model.")
    return model


def label_smoother(model: Any, epsilon: float) -> LabelSmoother | None:
    """The smoother that `label_smoothing_factor` asks for; None where it is 0 or each label is a yes or no."""
    if epsilon == 0:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        warnings.warn(
            f"label_smoothing_factor={epsilon} has no effect on multi-label classification.",
            TrainwrightWarning,
            stacklevel=4,
        )
        return None
    return LabelSmoother(epsilon=epsilon)


# -- the loss -------------------------------------------------------------------------------------------------------


def loss_rule(
    model: Any, args: Any, *, accepts_loss_kwargs: bool, has_loss_func: bool, is_scaled: bool | None, num_processes: int
) -> LossRule:
    return LossRule(
        counts_items=accepts_loss_kwargs or has_loss_func,
        shifts_labels=model_facts.shifts_labels(model),
        is_scaled=is_scaled,
        has_loss_func=has_loss_func,
        weights_items=getattr(args, "loss_weighting", "batches") == "items",
        aux_coefficient=model_facts.auxiliary_coefficient(model),
        num_processes=num_processes if args.average_tokens_across_devices else 1,
    )


def num_bytes(model: Any) -> int:
    """Memory of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) if hasattr(model, "parameters") else 0


def random_states(args: Any, *, num_processes: int) -> Any:
    """What a run that an error ends needs to save its last step; None where it does not.

    Not among several processes: those that have no error wait in the next step for the one that has. Nor where the
    weights change during the backward pass: they are between two steps then.
    """
    asked = resolve.checkpoint(args).saves_on_exception
    return rng if asked and num_processes == 1 and not steps_in_backward(args) else None


def smaller_batches(args: Any, engine: Engine) -> SmallerBatches | None:
    return SmallerBatches(engine, rng) if args.auto_find_batch_size else None


def facts(plan: StepPlan, parts: Any, device: torch.device) -> rules.Facts:
    """What the rules about a whole run need to know; `parts` has the user's objects as attributes."""
    eval_dataset = parts.eval_dataset
    return rules.Facts(
        max_steps=None if plan.has_open_end else plan.max_steps,
        has_open_end=plan.has_open_end,
        has_own_schedule=parts.lr_scheduler is not None and not parts._created_lr_scheduler,
        is_stream=not has_length(parts.train_dataset),
        has_eval_dataset=eval_dataset is not None,
        eval_names=tuple(eval_dataset) if isinstance(eval_dataset, dict) else (),
        has_compute_metrics=False if parts.only_loss_is_evaluated else None,
        device_type=device.type,
        supports_bf16=supports_bf16(device),
        supports_tf32=supports_tf32(device),
    )


def announce(
    plan: StepPlan,
    args: Any,
    state: TrainerState,
    *,
    device: torch.device,
    start: Start,
    note: str = "",
    changes: Iterable[object] = (),
) -> None:
    """Shows the effective plan when training starts, and says once which settings have no effect.

    `changes`: what differs from the checkpoint that is resumed from, as lines.
    """
    for message in rules.idle(args):
        logger.warning("%s", message)
    lines = effective_plan(args, plan, state, device=device)
    if start.checkpoint is not None:
        where = f"step {state.global_step}, {start.batches} batches into epoch {start.epoch + 1}"
        lines.append(f"resumes   {start.checkpoint}: {where}")
        if note:
            lines.append(f"goes on   {note}")
    show_lines(args, lines)
    show_lines(args, (f"changed   {change}" for change in changes), level=logging.WARNING)


def show_lines(args: Any, lines: Iterable[str], *, level: int = logging.INFO) -> None:
    """Lines for the person who watches; into the log where nobody does, or where only errors are shown."""
    shown = args.should_log and not args.disable_tqdm and logger.isEnabledFor(logging.WARNING)
    for line in lines:
        if shown:
            print(line, flush=True)
        elif args.should_log or level < logging.WARNING:
            logger.log(level, "%s", line)


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


def patches_for_a_run(args: Any, model: Any) -> list[Any]:
    """Changes to the model that last as long as training: context managers, in the order to enter them."""
    patches: list[Any] = []
    if args.use_liger_kernel:
        apply_liger_kernel(model, args.liger_kernel_config)
    if args.activation_checkpointing:
        patches.append(checkpointed_activations(model, args.activation_checkpointing_kwargs))
    if args.neftune_noise_alpha is not None:
        patches.append(noisy_embeddings(model, args.neftune_noise_alpha))
    if "underflow_overflow" in args.debug:
        patches.append(overflow_detection(model))
    return patches


# -- data -----------------------------------------------------------------------------------------------------------


def train_sampler(args: Any, dataset: Any, model_input_name: str | None, *, batch_size: int, num_processes: int) -> Any:
    """The order that the arguments ask for; None for a stream, which has its own."""
    seed = args.data_seed if args.data_seed is not None else torch.initial_seed()
    plan = resolve.sampling(
        args, batch_size=batch_size, seed=seed, num_processes=num_processes, length_of=model_input_name
    )
    return training_order(dataset, plan)


def eval_sampler(args: Any, dataset: Any, model_input_name: str | None) -> Any:
    if dataset is None or not has_length(dataset) or isinstance(dataset, IterableDataset):
        return None
    return SequentialSampler(dataset)


def row_collator(args: Any, order: PackedOrder, collate: Callable[..., Any], model: Any, processing_class: Any) -> Any:
    """The collator that makes packed rows of what `collate` makes of samples.

    Raises:
        ModelError: samples of a row would see each other in this model.
    """
    takes_positions = "position_ids" in model_facts.forward_parameters(model)
    with untouched_randomness():
        layout = find_layout(
            model,
            row_length=args.packing_length,
            num_rows=args.train_batch_size,
            takes_positions=takes_positions,
            length_of=order.length_of,
        )
    return RowCollator(
        collate,
        layout,
        length_of=order.length_of,
        pad_token_id=getattr(processing_class, "pad_token_id", None) or 0,
        masks_first=model_facts.shifts_labels(model) or model_facts.is_causal_lm(model),
        multiple_of=getattr(args, "pad_to_multiple_of", None),
    )


def samples_per_step(dataloader: Any, args: Any) -> int | None:
    """Samples of a step over all processes, on average, where batches differ in size; None where they do not."""
    order = formed_order(dataloader)
    if order is None:
        return None
    share = order.num_samples / max(len(order), 1)  # of a batch
    num_batches = resolve.micro_batches(args) * dataloader.batch_sampler.share.num_processes
    return int(max(round(share * num_batches), 1))


def make_loader(dataloader: Any) -> Loader:
    return Loader(dataloader, random_state=rng.capture, set_random_state=rng.restore)


@contextmanager
def untouched_randomness() -> Any:
    """Whatever happens inside leaves the random states as they were, so evaluating never changes training."""
    states = rng.capture()
    try:
        yield
    finally:
        rng.restore(states)


# -- checkpoints ----------------------------------------------------------------------------------------------------


def new_run_id() -> str:
    return uuid.uuid4().hex


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
    plan: StepPlan, loader: Loader, checkpoint: str | None, args: Any, *, batch_size: int
) -> tuple[StepPlan, str]:
    """The plan of a run that goes on from a checkpoint, and what there is to say about it.

    Raises:
        CheckpointError: the position is counted in batches, and these have another size now.
        DataError: there are more or fewer samples than there were.
    """
    manifest = manifest_of(checkpoint)
    if manifest is None or manifest.cursor is None:
        return plan, ""
    cursor = Cursor.from_dict(manifest.cursor)
    chunk = loader.chunk or batch_size * args.world_size
    now = Size(chunk=chunk, micro_batches=plan.micro_batches)
    before = Size.of_checkpoint(manifest.cursor, world_size=manifest.world_size, now=now)
    if before != now and loader.chunk is None:
        raise CheckpointError(
            f"The checkpoint was written with steps of {before} samples, and this run has {now}. The training "
            "dataloader is not one of the trainer's, so the position is known in batches only; resume with the same "
            "per_device_train_batch_size, gradient_accumulation_steps and number of processes."
        )
    if args.ignore_data_skip:
        cursor = replace(cursor, samples=0)
    check_same_data(cursor, loader.num_samples, loader.unit)
    return go_on(
        plan,
        cursor,
        step=manifest.step,
        batches_left=loader.batches_left(cursor, plan.batches_per_epoch),
        before=before,
        now=now,
        counts_epochs=args.max_steps <= 0,
    )


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
    loader: Loader, checkpoint: str, rng_file: Path | None, manifest: Manifest | None, *, skips: bool
) -> tuple[int, int] | None:
    """Gives the loader what it needs to go on where the checkpoint was; returns epoch and batches, if that tells.

    `skips`: what is trained of that epoch is not trained again.
    """
    if manifest is None or manifest.cursor is None:
        return None
    of_first = next((p for n in (1, 2) if (p := Path(checkpoint) / rng_name(0, n)).is_file()), None)
    path = rng_file or of_first  # a process that was not there yet: all must draw the same order of the epoch
    states = {} if path is None else rng.load(path)
    cursor = Cursor.from_dict(manifest.cursor)
    randomness = LoaderRandomness(
        epoch_start=states.get("loader_epoch_start"),
        before_ahead=states.get("loader_before_ahead"),
        stream=states.get("loader_stream"),
    )
    return loader.resume(cursor if skips else replace(cursor, samples=0), randomness)


def save_rng(folder: str, loader: Loader | None, engine: Engine, *, writes: bool) -> None:
    """Random states of all processes, each in a file of its own; the writing process writes them for all."""
    states = rng.capture()
    if loader is not None:
        randomness = loader.randomness()
        states |= {"loader_epoch_start": randomness.epoch_start, "loader_before_ahead": randomness.before_ahead}
        states["loader_stream"] = randomness.stream
    every = engine.gather_objects(states)
    for rank, one in enumerate(every if writes else ()):
        rng.save(Path(folder) / rng_name(rank, len(every)), one)


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


def rng_name(rank: int, num_processes: int) -> str:
    stem, dot, ending = RNG_STATE_NAME.partition(".")
    return RNG_STATE_NAME if num_processes == 1 else f"{stem}_{rank}{dot}{ending}"


def rng_file(folder: str, *, rank: int, num_processes: int) -> Path | None:
    """Where the random states of a process are, also if another number of processes wrote them; None: nowhere."""
    names = [rng_name(rank, num_processes), *((rng_name(0, 1), rng_name(0, 2)) if rank == 0 else ())]
    paths = [Path(folder) / name for name in names]
    return next((path for path in paths if path.is_file()), None)


def saves_in_background(args: Any, run: RunState, *, is_alone: bool, is_watched: bool) -> bool:
    """Whether a save may return before its files are there.

    Args:
        is_alone: there is one process.
        is_watched: code of the user's runs during a save or when it is done, and may look at the files.
    """
    asked = getattr(args, "save_async", None)
    return asked is not False and is_alone and not run.is_interrupted and (asked is True or not is_watched)


def check_first_checkpoint(args: Any, folder: str, model: Any) -> None:
    """Before step 1: whether the first checkpoint can fit on the disk.

    Raises:
        CheckpointWriteError: not even its weights do, and `save_failure` is "stop".
    """
    if args.save_strategy == "no":
        return
    root, what = Path(folder), "A checkpoint"
    surely = space.weights_bytes(model)
    likely = surely + (0 if args.save_only_model else space.estimated_optimizer_bytes(model))
    free = space.free_bytes(root)
    if free is None or free >= likely:
        return
    if free < surely and getattr(args, "save_failure", "stop") == "stop":
        space.check_room(root, surely, what=what)
    logger.warning("%s", space.too_little(root, likely, free, what=f"{what}, estimated with its optimizer,"))


def check_next_checkpoint(args: Any, folder: Path, model: Any, optimizer: Any) -> None:
    """Before a save writes anything.

    Raises:
        CheckpointWriteError: it cannot fit on the disk.
    """
    needed = space.weights_bytes(model) + (0 if args.save_only_model else space.optimizer_bytes(optimizer))
    space.check_room(folder, needed, what="The next checkpoint")


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


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of the run that wrote a checkpoint: how long it was to be, and which arguments differ now."""

    num_steps: int
    differences: list[Difference]


def before(checkpoint: str, args: Any, state: TrainerState, *, has_own_optimizer: bool) -> Before:
    """Compares the arguments with those in a checkpoint; transformers writes none that can be read safely.

    Raises:
        CheckpointError: two that no resume can carry out.
    """
    try:
        then = json.loads((Path(checkpoint) / TRAINING_ARGS_JSON_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        then = None
    now = json.loads(args.to_json_string())
    found = differences(then, now) if isinstance(then, dict) else []
    problems = list(contradictions(found, has_own_optimizer=has_own_optimizer))
    if problems:
        raise CheckpointError(f"{checkpoint} cannot be resumed from with these arguments:\n  " + "\n  ".join(problems))
    return Before(state.max_steps, found)


def carry_on(
    optimizer: Any, scheduler: Any, asked: continued.Asked, then: Before, *, args: Any, num_steps: int, is_own: bool
) -> list[str]:
    """Lets what differs take effect in the loaded states; returns it as lines.

    `asked` is what the arguments made of both before they were loaded; `is_own` is a schedule that is not ours.
    """
    changed = {one.name: (one.before, one.now) for one in then.differences}
    lines = [str(one) for one in then.differences]
    rate = continued.changed_rate(optimizer, asked)
    if rate is not None and "learning_rate" not in changed:  # another trainer's checkpoint, or a user's optimizer
        changed["learning_rate"] = rate
        lines.append(str(Difference("learning_rate", *rate)))
    continued.apply_changes(optimizer, scheduler, asked, changed)
    is_new = not changed.keys().isdisjoint(continued.SHAPES)

    def build(stand_in: Any, length: int) -> Any:
        warmup, options = args.get_warmup_steps(length), args.lr_scheduler_kwargs
        return make_schedule(
            args.lr_scheduler_type, stand_in, num_warmup_steps=warmup, num_training_steps=length, options=options
        )

    if not is_own:
        length = then.num_steps if num_steps == OPEN_END else num_steps  # without a length no rate depends on one
        continued.continue_towards(scheduler, build, before=then.num_steps, now=length, is_new=is_new)
    if num_steps != then.num_steps and then.num_steps > 0 and OPEN_END not in (num_steps, then.num_steps):
        how = "" if is_own or is_new else "; the rate goes on from where it stands towards the new end, without a jump"
        lines.append(f"length {then.num_steps} -> {num_steps} steps{how}")
    return lines


def write_state(state: Any, stateful: list[Any], folder: Path) -> None:
    state.stateful_callbacks = collect_states(stateful)
    state.save_to_json(folder / TRAINER_STATE_NAME)


def restore_callbacks(states: dict[str, Any], callbacks: Iterable[Any], *, with_settings: bool) -> None:
    """Gives callbacks their state back, matched by class; their own settings stay unless `with_settings`."""
    waiting = {name: list(state) if isinstance(state, list) else [state] for name, state in states.items()}
    for callback in callbacks:
        state = waiting.get(type(callback).__name__)
        if not state or not callable(getattr(callback, "state", None)):
            continue
        saved, now = state.pop(0), callback.state()
        for part in ("args", "attributes") if with_settings else ("attributes",):
            values = saved.get(part) if isinstance(saved, dict) else None
            for name, value in values.items() if isinstance(values, dict) else ():
                if name in now.get(part, {}):  # what a callback does not export is not set either
                    setattr(callback, name, value)
