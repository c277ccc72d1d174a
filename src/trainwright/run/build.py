"""Composition root: builds the working parts from the arguments and the user's objects, with their dependencies."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainwright._types import Model, Trial, has_length, hide
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import TimeLimits
from trainwright.capability import Capability, Moment, RunContext
from trainwright.capability_table import MADE, load_service
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.config import resolve
from trainwright.config.arguments import TrainingArguments
from trainwright.config.behaviour import get_behaviour
from trainwright.config.coerce import WARM_UP, output_path
from trainwright.config.fields import get_value
from trainwright.config.plans import StepPlan
from trainwright.config.rules.stages import RunFacts, check_run
from trainwright.data.seeding import enable_full_determinism, set_seed
from trainwright.distributed.device import (
    DeviceMemory,
    get_kind,
    pins_memory_here,
    supports_bf16,
    supports_tf32,
)
from trainwright.distributed.world import reading_launchers_variables
from trainwright.engine.base import Engine
from trainwright.engine.select import select_engine
from trainwright.errors import ArgumentError, LegacyNameWarning, ModelError, TrainwrightWarning
from trainwright.journal.record import JournalListener
from trainwright.loop.extension import Extension
from trainwright.run.adoption import Adoption
from trainwright.state.memory_tracker import TrainerMemoryTracker
from trainwright.state.progress import Clock
from trainwright.support import model_facts
from trainwright.support.hooks import Events, is_overridden
from trainwright.support.host import in_notebook
from trainwright.support.loss_normalization import LabelSmoother, LossRule
from trainwright.support.replaced import current
from trainwright.support.signatures import POSITIONAL, read_parameters

if TYPE_CHECKING:
    from trainwright.callbacks.preemption import JITCheckpointCallback
    from trainwright.evaluation.eval_loop import EvalContext

WITH_OPTIMIZER = 3  # times the weights: Adam has two moments
SLOW_DISK = 100e6  # bytes per second assumed for a save until one has been measured


@dataclass(kw_only=True)
class Services:
    """Objects of a trainer in this process besides the user's objects; another process, or a copy, makes its own."""

    writer: CheckpointWriter  # writes checkpoints, one at a time
    memory_tracker: TrainerMemoryTracker
    journal: JournalListener = field(default_factory=lambda: JournalListener(Clock()))
    uploads: Uploads = field(default_factory=lambda: NoUploads())  # an uploader once a repository is open
    eval_dataloaders: dict[str, Any] = field(default_factory=dict)  # by the name of the set, if workers are kept
    # `is_<backend>_enabled` and a backend's own engine, as read from the trainer by other code
    flags: SimpleNamespace = field(default_factory=SimpleNamespace)
    adoption: Adoption = field(default_factory=Adoption)  # the model that the trainer has taken over
    engine: Engine = field(init=False)  # the backend; replaced by `use_engine`
    # gathers a value from all processes; may be replaced
    gather_function: Callable[[Any], Any] = field(init=False)
    callback_handler: CallbackHandler = field(init=False)  # receives the events

    @classmethod
    def for_arguments(cls, args: Any, *, measures_memory: bool = True) -> Services:
        writer = CheckpointWriter(goes_on=get_value(args, "save_failure") == "continue")
        skips = args.skip_memory_metrics or not measures_memory
        tracker = current("TrainerMemoryTracker", TrainerMemoryTracker)
        return cls(writer=writer, memory_tracker=tracker(skips, DeviceMemory()))

    def use_engine(self, engine: Engine) -> None:
        self.engine = engine
        self.gather_function = engine.gather
        self.read_flags()

    def read_flags(self) -> None:
        """Asks the engine which backend it is; it may know more once it is set up."""
        vars(self.flags).update(self.engine.published_flags())

    def use_callbacks(self, handler: CallbackHandler, clock: Clock) -> None:
        """Sends to the journal everything that the callbacks receive."""
        self.callback_handler = handler
        handler.watch(self.journal)
        self.use_clock(clock)

    def use_clock(self, clock: Clock) -> None:
        """Lets the clock of a run time its callbacks and its journal."""
        self.callback_handler.clock = self.journal.clock = clock


class Uploads(Protocol):
    """Uploads to the Hub, as a run and its trainer use them."""

    @property
    def in_progress(self) -> object:
        """Uploads of the last checkpoint; None before the first."""

    def take_up(self) -> None:
        """Sends what earlier trainings in this directory have left."""

    def abandon_after(self, error: BaseException) -> None:
        """Lets the process end without waiting if a signal ended a training."""

    def push_checkpoint(self, checkpoint: Path, *args: Any, **kwargs: Any) -> None:
        """Uploads a checkpoint."""

    def finish(self, *, unless: Callable[[], bool]) -> None:
        """Waits for uploads and makes up for failed ones; at once when `unless` says so."""


class NoUploads:
    """Stands in for the uploader until a repository is opened, and in all processes but the first."""

    def __init__(self) -> None:
        self.in_progress: object = None

    def take_up(self) -> None:
        """Does nothing, like the other methods."""

    def abandon_after(self, error: BaseException) -> None: ...

    def push_checkpoint(self, checkpoint: Path, *args: object, **kwargs: object) -> None: ...

    def finish(self, *, unless: Callable[[], bool]) -> None: ...


class NoSearch:
    """Stands in for `search.base.SearchState` while no hyperparameter search is running."""

    is_under_way = False

    def __init__(self) -> None:
        # Published by the trainer, where other code may delete it.
        self.name: object = None
        self.space: object = None
        self.hp_name: object = None
        self.compute_objective: object = None
        self.objective: object = None


# -- extensions -------------------------------------------------------------------------------------------------------


def make_extensions(moment: Moment, context: RunContext) -> list[Extension]:
    """Makes the extensions of a run whose moment has come: each capability of the table makes its own, or none."""
    made = {one.name: one for one in context.run.extensions}
    known = set(made)
    for row in MADE:
        capability: Capability = row.load()
        if capability.moment is moment and (extension := capability.make(context, made)) is not None:
            made[row.name] = extension
    return [one for name, one in made.items() if name not in known]


# -- a trainer --------------------------------------------------------------------------------------------------------


def apply_arguments(args: Any, model: Model) -> Any:
    """Returns the arguments, or default ones; from then on they set the seed and the log level."""
    if args is None:
        args = TrainingArguments(output_dir="tmp_trainer")
    hide(getattr(args, "hub_token", None))
    output_path(args)  # a later change of the working directory does not move the run
    if model_facts.num_devices(model) > 1:
        args._n_gpu = 1  # the model has the GPUs: it is not replicated to them
    seed_everything(args)
    level = args.get_process_log_level()
    for name in {"trainwright", "transformers"} & sys.modules.keys():
        if (known := logging.getLogger(name)).level != level:  # setting a level clears the caches of all loggers
            known.setLevel(level)
    return args


def seed_everything(args: Any) -> None:
    """Seeds all generators by `seed`, or makes all operations deterministic by `full_determinism`."""
    if args.full_determinism:
        current("enable_full_determinism", enable_full_determinism)(args.seed)
    else:
        current("set_seed", set_seed)(args.seed)


def make_engine(args: Any, model: Model = None, *, stands_in: bool = False) -> Engine:
    """Makes the engine that the arguments ask for.

    Args:
        args: the settings.
        model: the model to train, if it exists already; its weights may be distributed over processes.
        stands_in: the tensors have no memory, and there are no other processes.
    """
    if args.tf32:  # refused before the engine sets it
        device = torch.device(args.device)
        check_run(args, RunFacts(device_type=device.type, supports_tf32=supports_tf32(device)))
    with reading_launchers_variables():
        plan = resolve.engine(args, None if model is None else model_facts.model_layout(model))
        return select_engine(replace(plan, stands_in=stands_in))


def make_callbacks(
    args: Any, callbacks: Iterable[Any] | None, *, engine: Engine, writer: CheckpointWriter, **context: Any
) -> CallbackHandler:
    """Returns the handler: flow control, trackers, the user's callbacks, callbacks of the arguments, progress bars.

    Saving on request (`enable_jit_checkpoint`) comes before the user's callbacks, as in transformers.
    """
    trackers: list[type[Any]] = []
    find_trackers: Any = current("get_reporting_integration_callbacks", None)
    if find_trackers is None and args.report_to not in ([], None):
        find_trackers = load_service("trackers").get_reporting_integration_callbacks
    if find_trackers is not None:
        trackers += find_trackers(args.report_to)
    from trainwright.callbacks import progress

    default = current("DEFAULT_CALLBACKS", progress.DEFAULT_CALLBACKS)
    make_handler = current("CallbackHandler", CallbackHandler)
    given = list(callbacks or ())
    handler = make_handler([*default, *trackers, *_jit_callbacks(args, given), *given], **context)
    handler.args = args
    if (limits := time_limits(args, context["model"], engine=engine, writer=writer)) is not None:
        handler.add_callback(limits)
    if resolve.checkpoint(args).requeues:
        from trainwright.callbacks.preemption import SlurmRequeue

        handler.add_callback(SlurmRequeue)
    if args.disable_tqdm:
        handler.add_callback(current("PrinterCallback", progress.PrinterCallback))
        return handler
    bar: Any = current("DEFAULT_PROGRESS_CALLBACK", progress.DEFAULT_PROGRESS_CALLBACK)
    if bar is progress.ProgressCallback and in_notebook():
        from trainwright.callbacks.notebook import NotebookProgressCallback

        bar = NotebookProgressCallback
    handler.add_callback(bar)
    return handler


def _jit_callbacks(args: Any, given: list[Any]) -> list[Any]:
    """Returns the callback that saves on request if the arguments ask for it and the user has given none."""
    if not args.enable_jit_checkpoint:
        return []
    from trainwright.callbacks.preemption import JITCheckpointCallback

    kinds = [callback if isinstance(callback, type) else type(callback) for callback in given]
    is_given = any(issubclass(kind, JITCheckpointCallback) for kind in kinds)
    return [] if is_given else [JITCheckpointCallback]


def untied_jit_callbacks(handler: CallbackHandler) -> list[JITCheckpointCallback]:
    """Returns the callbacks that save on request and are not yet tied to a trainer."""
    from trainwright.callbacks.preemption import JITCheckpointCallback

    found = [callback for callback in handler.callbacks if isinstance(callback, JITCheckpointCallback)]
    return [callback for callback in found if callback.trainer is None]


def time_limits(args: Any, model: Any, *, engine: Engine, writer: CheckpointWriter) -> TimeLimits | None:
    """Returns the callback that saves and ends by the clock; None if the arguments do not ask for it."""
    plan = resolve.checkpoint(args)
    if plan.max_train_s is None and plan.save_every_s is None:
        return None
    first_s = num_bytes(model) * WITH_OPTIMIZER / SLOW_DISK
    return TimeLimits(
        plan.max_train_s, plan.save_every_s, save_s=lambda: writer.longest_s, first_save_s=first_s, agree=engine.agree
    )


@contextmanager
def run_callbacks(handler: CallbackHandler, args: Any, folder: str) -> Iterator[None]:
    """Wraps a run: adds the callbacks that its arguments ask for, for this run only."""
    if (traced := resolve.profiled(args)) is None:
        yield
        return
    from trainwright.callbacks.profiling import StepProfiler

    profiler = StepProfiler(folder, traced.first, traced.num, warm_up=WARM_UP)
    handler.add_callback(profiler)
    try:
        yield
    finally:
        handler.remove_callback(profiler)


def one_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """Returns the processing class, also if it was passed under its older name."""
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise ArgumentError("Trainer got processing_class and tokenizer, its older name. Pass only processing_class.")
    warnings.warn("Trainer(tokenizer=...) is now Trainer(processing_class=...).", LegacyNameWarning, stacklevel=4)
    return tokenizer


# -- a model ----------------------------------------------------------------------------------------------------------


def call_model_init(model_init: Callable[..., Any], trial: Trial) -> Any:
    """Returns a model from the user's function, which takes no argument or the trial."""
    parameters = (read_parameters(model_init) or {}).values()
    num_arguments = sum(one.kind in POSITIONAL for one in parameters)
    if num_arguments > 1:
        raise ModelError(
            f"model_init takes {num_arguments} arguments; it must take none, or one: the trial of a search."
        )
    model = model_init(trial) if num_arguments == 1 else model_init()
    if model is None:
        raise ModelError("model_init returned None; it must return the model.")
    return model


def num_bytes(model: Model) -> int:
    """Returns the memory of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) if hasattr(model, "parameters") else 0


@contextmanager
def patched(
    args: Any,
    model: Model,
    engine: Engine,
    *,
    keeps_outputs: bool,
    noise: AbstractContextManager[None],
    is_alone: bool = False,
) -> Iterator[None]:
    """Returns the model as used in training: with the changes that the arguments ask for, and in mixed precision.

    `noise` is the context in which the trainer adds noise to its embeddings. With `is_alone` the other processes do
    not come here, so nothing is agreed with them.
    """
    from trainwright.support import patches

    with ExitStack() as stack:
        enter = stack.enter_context
        if args.use_liger_kernel:
            current("apply_liger_kernel", patches.apply_liger_kernel)(model, args.liger_kernel_config)
        if get_value(args, "activation_checkpointing"):
            options = get_value(args, "activation_checkpointing_kwargs")
            enter(patches.checkpointed_activations(model, options, pins_memory=pins_memory_here()))
        if resolve.compiles_blocks(args):
            backend = args.torch_compile_backend
            mode = args.torch_compile_mode
            enter(patches.compiled_blocks(model, backend=backend, mode=mode))
        enter(noise)
        if (kernel := get_value(args, "loss_kernel")) is not None:
            from trainwright.support.loss_kernels import without_logits

            runs_triton = get_kind(engine.device).runs_triton
            enter(
                without_logits(
                    model,
                    kernel,
                    keeps_outputs=keeps_outputs,
                    obstacle=engine.hides_output_layer,
                    runs_triton=runs_triton,
                    **({} if is_alone else {"agree": engine.agree}),
                )
            )
        if "underflow_overflow" in args.debug:
            enter(patches.overflow_detection(model))
        enter(engine.mixed_precision(model, keeps_outputs=keeps_outputs))
        yield


# -- a loss -----------------------------------------------------------------------------------------------------------


def label_smoother(model: Model, epsilon: float) -> LabelSmoother | None:
    """Returns the smoother for `label_smoothing_factor`; None if it is 0 or the labels are multi-label."""
    if epsilon == 0:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        message = f"label_smoothing_factor={epsilon} has no effect on multi-label classification."
        warnings.warn(message, TrainwrightWarning, stacklevel=4)
        return None
    return current("LabelSmoother", LabelSmoother)(epsilon=epsilon)


def loss_rule(
    model: Model,
    args: Any,
    *,
    accepts_loss_kwargs: bool,
    declares_loss_kwargs: bool,
    has_loss_func: bool,
    has_own_loss: bool,
    smooths_labels: bool,
    is_scaled: bool | None,
    num_processes: int,
) -> LossRule:
    """Returns how the losses of a run are scaled; `num_processes` average their gradients.

    `accepts_loss_kwargs`: the model is given `num_items_in_batch`; `declares_loss_kwargs`: the user says so.
    `has_own_loss`: a subclass defines `compute_loss`. `smooths_labels`: label smoothing makes the loss, and divides by
    the items. `is_scaled` is the user's declaration about losses; None if there is none.
    """
    behaviour = get_behaviour(args)
    weighting = get_value(args, "loss_weighting")
    if not weighting and not behaviour.averages_means_over_window:
        weighting = "original"
    is_original = weighting == "original"
    by_items = weighting == "items"
    is_of_user = has_own_loss or has_loss_func
    is_mean = not (is_original or is_of_user or smooths_labels or declares_loss_kwargs)
    is_mean = is_mean and model_facts.ignores_item_count(model)
    is_in_question = is_of_user or (not smooths_labels and not is_mean and model_facts.has_own_loss(model))
    is_declared = is_scaled is not None or (declares_loss_kwargs and not has_loss_func)
    counts_items = (accepts_loss_kwargs and not is_mean) or has_loss_func
    return LossRule(
        counts_items=counts_items or (by_items and smooths_labels),
        shifts_labels=model_facts.shifts_labels(model, declared_only=not behaviour.counts_predicted_tokens),
        is_scaled=is_scaled,
        has_loss_func=has_loss_func and is_original,
        weights_items=(by_items and not smooths_labels) or (is_mean and weighting is None),
        is_open=counts_items and is_in_question and not (is_original or is_declared),
        aux_coefficient=model_facts.auxiliary_coefficient(model),
        num_processes=num_processes if args.average_tokens_across_devices else 1,
    )


def loss_note(model: Model, args: Any, run: Any) -> str:
    """Returns what the lines at the start of a run say about its loss; "" where there is nothing to say."""
    question = run.extensions.get("loss_question")
    note: str = getattr(question, "note", "")
    return note or describe_mean(model, args, run.loss_rule)


def describe_mean(model: Model, args: Any, rule: LossRule) -> str:
    """Returns a note if a run divides a model's loss that transformers would add up as means; "" otherwise."""
    factor = args.gradient_accumulation_steps * rule.num_processes
    if factor == 1 or not rule.weights_items or get_value(args, "loss_weighting") is not None:
        return ""
    name = type(model_facts.core_model(model)).__name__
    return (
        f"mean over the {factor} micro-batches of a step, since {name} ignores num_items_in_batch; "
        "loss_weighting='original' adds up their means, as transformers does"
    )


# -- plans ------------------------------------------------------------------------------------------------------------


def step_plan(args: Any, values: tuple[Any, ...]) -> StepPlan:
    """Returns the plan for the values of `set_initial_training_values`."""
    return StepPlan.from_values(values, micro_batches=resolve.micro_batches(args), max_grad_norm=args.max_grad_norm)


def rule_facts(plan: StepPlan, parts: Any, device: torch.device) -> RunFacts:
    """Returns the facts about a run for the rules that check it; `parts` has the user's objects as attributes."""
    eval_dataset = parts.eval_dataset
    loops = ("evaluate", "evaluation_loop", "_evaluate", "prediction_loop")
    has_metrics = parts.compute_metrics is not None or is_overridden(parts, *loops)
    return RunFacts(
        max_steps=None if plan.has_open_end else plan.max_steps,
        num_epochs=None if parts.args.max_steps > 0 else parts.args.num_train_epochs,
        has_open_end=plan.has_open_end,
        has_own_schedule=parts.lr_scheduler is not None and not parts._created_lr_scheduler,
        is_stream=not has_length(parts.train_dataset),
        has_eval_dataset=eval_dataset is not None,
        eval_names=tuple(eval_dataset) if isinstance(eval_dataset, dict) else (),
        has_compute_metrics=None if has_metrics else False,
        device_type=device.type,
        num_processes=parts.args.world_size,
        supports_bf16=supports_bf16(device),
        supports_tf32=supports_tf32(device),
    )


def evaluation_context(
    args: Any, services: Services, *, events: Events, compute_metrics: Any, is_prediction: bool, **parts: Any
) -> EvalContext:
    """Returns the context of one evaluation; `parts` are further fields. Predictions are kept and may lack labels."""
    from trainwright.evaluation.eval_loop import EvalContext, is_streaming
    from trainwright.evaluation.nested_collector import gather_results

    engine = services.engine
    streams = args.batch_eval_metrics or is_streaming(compute_metrics)

    def gather(value: Any) -> Any:
        if not args.eval_use_gather_object or engine.num_replicas == 1:
            return services.gather_function(value)
        return gather_results(value, engine.gather_replica_objects)

    return EvalContext(
        plan=resolve.evaluation(args),
        events=events,
        gather=gather,
        gather_objects=None if engine.num_replicas == 1 else engine.gather_replica_objects,
        total=engine.sum,
        collect=engine.stacked,
        batch_size=args.eval_batch_size,
        device=engine.device,
        compute_metrics=compute_metrics,
        needs_labels=not is_prediction,
        keeps_results=is_prediction or not streams,
        **parts,
    )
