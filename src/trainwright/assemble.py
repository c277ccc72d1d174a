"""The composition root: arguments and the user's objects in, working parts out. The only file that knows every wing."""

from __future__ import annotations

import inspect
import logging
import uuid
import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, SequentialSampler

from trainwright import model_facts
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.callbacks.progress import PrinterCallback, ProgressCallback
from trainwright.checkpoint import rng
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.retention import to_remove
from trainwright.checkpoint.store import CheckpointStore, verified
from trainwright.config import resolve, rules
from trainwright.config.effective import effective_plan
from trainwright.config.plans import StepPlan
from trainwright.data.apart import find_layout
from trainwright.data.cursor import Cursor, LoaderRandomness
from trainwright.data.groups import formed_order
from trainwright.data.loader import Loader
from trainwright.data.orders import training_order
from trainwright.data.packing import PackedOrder
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
from trainwright.loop.label_smoother import LabelSmoother
from trainwright.loop.loss_scale import LossRule
from trainwright.loop.oom import SmallerBatches
from trainwright.loop.session import Start
from trainwright.patches.activations import checkpointed_activations
from trainwright.patches.debug import overflow_detection
from trainwright.patches.liger import apply_liger_kernel
from trainwright.patches.neftune import noisy_embeddings
from trainwright.state.exportable import collect_states
from trainwright.state.trainer_state import TrainerState
from trainwright.types import RNG_STATE_NAME, TRAINER_STATE_NAME, has_length

logger = logging.getLogger(__name__)


# -- what a trainer is made of --------------------------------------------------------------------------------------


def seed_everything(args: Any) -> None:
    enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)


def make_engine(args: Any) -> Engine:
    return select_engine(resolve.engine(args))


def make_callbacks(args: Any, callbacks: Iterable[Any] | None, **context: Any) -> CallbackHandler:
    """The handler with the flow, the user's callbacks, and what shows progress."""
    handler = CallbackHandler([DefaultFlowCallback, *(callbacks or ())], **context)
    handler.args = args
    handler.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
    return handler


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


def smaller_batches(args: Any, engine: Engine) -> SmallerBatches | None:
    return SmallerBatches(engine, rng) if args.auto_find_batch_size else None


def facts(plan: StepPlan, parts: Any, device: torch.device) -> rules.Facts:
    """What the rules about a whole run need to know; `parts` has the user's objects as attributes."""
    eval_dataset = parts.eval_dataset
    return rules.Facts(
        max_steps=plan.max_steps,
        is_stream=not has_length(parts.train_dataset),
        has_eval_dataset=eval_dataset is not None,
        eval_names=tuple(eval_dataset) if isinstance(eval_dataset, dict) else (),
        has_compute_metrics=False if parts.only_loss_is_evaluated else None,
        device_type=device.type,
        supports_bf16=supports_bf16(device),
        supports_tf32=supports_tf32(device),
    )


def announce(plan: StepPlan, args: Any, state: TrainerState, *, device: torch.device, start: Start) -> None:
    """Shows the effective plan when training starts, and says once which settings have no effect."""
    for message in rules.idle(args):
        logger.warning("%s", message)
    lines = effective_plan(args, plan, state, device=device)
    if start.checkpoint is not None:
        where = f"step {state.global_step}, {start.batches} batches into epoch {start.epoch + 1}"
        lines.append(f"resumes   {start.checkpoint}: {where}")
    shown = args.should_log and not args.disable_tqdm and logger.isEnabledFor(logging.WARNING)
    for line in lines:
        if shown:
            print(line, flush=True)
        else:
            logger.info("%s", line)


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

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: the named one is damaged.
    """
    if asked is None or asked is False:
        return None
    if asked is not True:
        return str(verified(asked))
    latest = CheckpointStore(output_dir).latest()
    if latest is None:
        raise CheckpointNotFoundError(
            f"resume_from_checkpoint=True, but there is no complete checkpoint in output_dir={output_dir!r}. "
            "Start without it, or name the directory of a checkpoint."
        )
    return str(latest)


def manifest_of(checkpoint: str | None) -> Manifest | None:
    return None if checkpoint is None else Manifest.read(Path(checkpoint))


def check_same_steps(manifest: Manifest | None, *, batch_size: int, micro_batches: int) -> None:
    """A position counted in other steps than this run's cannot be gone on from yet.

    Raises:
        CheckpointError: names both settings.
    """
    before = (manifest.cursor or {}) if manifest is not None else {}
    then = (before.get("batch_size", batch_size), before.get("micro_batches", micro_batches))
    if then != (batch_size, micro_batches):
        raise CheckpointError(
            f"The checkpoint was written with a batch of {then[0]} and gradient_accumulation_steps={then[1]}, and this "
            f"run has {batch_size} and {micro_batches}; resuming across that is not there yet. Resume with the same "
            "two settings."
        )


def resume_loader(loader: Loader, checkpoint: str, manifest: Manifest | None) -> tuple[int, int] | None:
    """Gives the loader what it needs to go on where the checkpoint was; returns epoch and batches, if that tells."""
    if manifest is None or manifest.cursor is None:
        return None
    path = Path(checkpoint) / RNG_STATE_NAME
    states = rng.load(path) if path.is_file() else {}
    randomness = LoaderRandomness(
        epoch_start=states.get("loader_epoch_start"), before_ahead=states.get("loader_before_ahead")
    )
    cursor = Cursor.from_dict(manifest.cursor)
    loader.resume(cursor, randomness)
    return loader.position(cursor)


def save_rng(folder: str, loader: Loader | None) -> None:
    states = rng.capture()
    if loader is not None:
        randomness = loader.randomness()
        states |= {"loader_epoch_start": randomness.epoch_start, "loader_before_ahead": randomness.before_ahead}
    rng.save(Path(folder) / RNG_STATE_NAME, states)


def load_rng(folder: str) -> None:
    path = Path(folder) / RNG_STATE_NAME
    if not path.is_file():
        logger.warning("%s has no %s: random draws will differ from the uninterrupted run's.", folder, path)
        return
    rng.restore(rng.load(path))


@contextmanager
def staged_checkpoint(store: CheckpointStore, manifest: Manifest) -> Any:
    """A directory to write a checkpoint into; committed at the end, thrown away if something fails."""
    staging = store.stage(manifest.step)
    try:
        yield staging
        store.commit(staging, manifest)
    except BaseException:
        store.discard(staging)
        raise


def rotate(store: CheckpointStore, args: Any, *, run_id: str, best: int | None) -> None:
    keep_last = resolve.checkpoint(args).keep_last
    if keep_last is None:
        return
    for step in to_remove(store.steps(), keep_last=keep_last, best=best, owned=store.owned_by(run_id)):
        store.remove(step)


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
    best = state.best_model_checkpoint
    if best is not None and not Path(best).is_dir():
        logger.warning("The best checkpoint so far, %s, is gone; the next better one takes its place.", best)
        state.best_model_checkpoint = None
    return state


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
        saved = state.pop(0)
        values = {**(saved.get("args", {}) if with_settings else {}), **saved.get("attributes", {})}
        for name, value in values.items():
            setattr(callback, name, value)
