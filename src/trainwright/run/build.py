"""Composition root: builds the working parts from the arguments and the user's objects, with their dependencies."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from trainwright._types import DatasetLike, Model, Optimizer, Trial, has_length, hide, is_instance_of
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import TimeLimits
from trainwright.checkpoint import training_state
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.config import resolve
from trainwright.config.arguments import TrainingArguments
from trainwright.config.behaviour import behaviour_of
from trainwright.config.coerce import WARM_UP, StepRange, output_path
from trainwright.config.fields import value_of
from trainwright.config.plans import StepPlan
from trainwright.config.rules.stages import RunFacts, check_run
from trainwright.data.mixture import as_mixture
from trainwright.data.row_names import NamesOf, row_names
from trainwright.data.seeding import enable_full_determinism, set_seed
from trainwright.distributed.device import (
    DeviceMemory,
    device_variables,
    kind_of,
    pins_memory_here,
    supports_bf16,
    supports_tf32,
)
from trainwright.distributed.world import reading_launchers_variables, without_launcher
from trainwright.engine.base import Engine
from trainwright.engine.select import select_engine
from trainwright.errors import ArgumentError, LegacyNameWarning, ModelError, TrainwrightWarning
from trainwright.journal.record import JournalListener
from trainwright.loop.extension import Extension
from trainwright.run.adoption import Adoption
from trainwright.state.memory_tracker import TrainerMemoryTracker
from trainwright.state.progress import Clock
from trainwright.support import model_facts
from trainwright.support.hooks import Events, has_hook, is_overridden
from trainwright.support.host import in_notebook
from trainwright.support.loss_normalization import LabelSmoother, LossRule
from trainwright.support.replaced import current
from trainwright.support.signatures import POSITIONAL, read_parameters

if TYPE_CHECKING:
    from trainwright.callbacks.preemption import JITCheckpointCallback
    from trainwright.evaluation.eval_loop import EvalContext
    from trainwright.extensions.async_evaluation.evaluators import Evaluator
    from trainwright.extensions.incidents.incident_log import Incident, Record
    from trainwright.extensions.incidents.recorder import IncidentRecorder
    from trainwright.hub.uploader import Uploader
    from trainwright.support.evaluation_requests import Requests

WITH_OPTIMIZER = 3  # times the weights: Adam has two moments
WATCH = "watch"  # value of eval_async: processes of `trainwright eval RUN --watch` evaluate
SLOW_DISK = 100e6  # bytes per second assumed for a save until one has been measured


@dataclass(kw_only=True)
class Services:
    """Objects of a trainer in this process besides the user's objects; another process, or a copy, makes its own."""

    writer: CheckpointWriter  # writes checkpoints, one at a time
    memory_tracker: TrainerMemoryTracker
    journal: JournalListener = field(default_factory=lambda: JournalListener(Clock()))
    uploads: Uploader | NoUploads = field(default_factory=lambda: NoUploads())  # an uploader once a repository is open
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
        writer = CheckpointWriter(goes_on=value_of(args, "save_failure") == "continue")
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


def data_of(hooks: Any) -> DatasetLike:
    """Returns the training data; a dict, which may be assigned after construction, as the mixture that is read.

    The user's own dataloader may take the dict itself.
    """
    is_own = is_overridden(hooks, "get_train_dataloader")
    return hooks.train_dataset if is_own else as_mixture(hooks.train_dataset)


def extensions_of_directory(args: Any, engine: Engine, *, folder: str, dataset: DatasetLike) -> list[Extension]:
    """Returns the extensions of a run that are needed before its model and data.

    These are the lease, the quarantine, and the copies under a URL.
    """
    from trainwright.extensions.lease.extension import DirectoryLease
    from trainwright.extensions.quarantine.extension import Quarantine

    may_save = resolve.checkpoint(args).may_save
    wait_s = value_of(args, "output_dir_wait_s")
    found: list[Extension] = [
        DirectoryLease(folder, engine.agree, may_save=may_save, wait_s=wait_s),
        Quarantine(output_path(args), dataset, NamesOf(dataset, id_column=resolve.id_column(args)), engine.agree),
    ]
    mirror = resolve.mirror(args, folder)
    if mirror is not None and may_save:
        from trainwright.extensions.mirror.extension import Place, RunMirror

        found.append(
            RunMirror(
                mirror,
                folder,
                Place(
                    args.process_index,
                    args.local_process_index,
                    engine.agree,
                    engine.gather_objects,
                    lambda: engine.writes_parts,
                ),
                wait_s=wait_s,
                overwrites=getattr(args, "overwrite_output_dir", None),
            )
        )
    return found


def extensions_of_training(
    run: Any,
    hooks: Any,
    engine: Engine,
    *,
    folder: str,
    load_newest: Callable[[], int],
    show: Callable[[str], None],
) -> list[Extension]:
    """Returns the other extensions of a run, once its setup exists.

    Args:
        run: the run.
        hooks: the trainer; extensions that hold it release it when the run is over.
        engine: engine of the run.
        folder: output directory of the run.
        load_newest: loads weights, optimizer and schedule of the run's newest checkpoint, and returns its step.
        show: shows a line to the user.
    """
    from trainwright.extensions.checkpoint_items.extension import CheckpointItems
    from trainwright.extensions.incidents.recorder import IncidentRecorder
    from trainwright.extensions.recorded_metrics.extension import RecordedNumbers

    args = hooks.args
    setup = run.setup
    writes = args.should_save
    may_be_dropped = run.plan.micro_batches > 1 or setup.prepares_windows
    may_be_retried = setup.random_states is not None or setup.smaller_batches is not None
    names = _names_of_data(hooks)
    recorder = IncidentRecorder(hooks, run, engine, folder, names=names)
    found: list[Extension] = [
        RecordedNumbers(run.progress, writes=writes, is_first=engine.replica == 0),
        CheckpointItems(
            training_state.read_items(hooks), engine, writes=writes, is_rewindable=may_be_dropped or may_be_retried
        ),
        recorder,
        *loss_question(run, hooks, engine, folder=folder, show=show),
    ]
    guard = _guard(run, hooks, engine, record=recorder.record, load_newest=load_newest)
    if guard is not None:
        found.append(guard)
    elif engine.scales_loss and kind_of(engine.device).has_streams:
        # In fp16, this guard reads numbers of each step (`on_spike`), so waiting less would gain nothing.
        from trainwright.extensions.loss_scale.extension import SkippedUpdates

        found.append(SkippedUpdates(engine))
    if engine.num_replicas > 1:
        from trainwright.extensions.slow_ranks.extension import SlowRanks

        found.append(SlowRanks(engine, folder))
    if (plan := resolve.average(args)) is not None:
        from trainwright.extensions.averages.extension import WeightAverages

        others = (*run.extensions, *found)
        num_steps = None if run.plan.has_open_end else run.plan.max_steps
        is_late = any(one.refuses_late for one in others)
        found.append(WeightAverages(plan, setup.model, engine, num_steps=num_steps, is_late=is_late, writes=writes))
    if (recorded := resolve.recorded_values(args)) is not None:
        found.append(value_recorder(hooks, engine, recorded, folder=folder))
    found += _ancestry(run)
    if wanted := value_of(args, "live_control"):
        from trainwright.extensions.control.extension import LiveControl

        found.append(
            LiveControl(
                folder,
                engine,
                args,
                callbacks=hooks.callback_handler,
                can_evaluate=hooks.eval_dataset is not None,
                repeats=wanted if isinstance(wanted, str) else None,
            )
        )
    settle_guard = guard.settle if guard is not None else _nothing
    found += _followers_of_samples(run, hooks, engine, folder=folder, settle_guard=settle_guard)
    return found


def value_recorder(hooks: Any, engine: Engine, steps: StepRange, *, folder: str) -> Extension:
    """Returns the extension that records the values of some steps.

    Args:
        hooks: the trainer.
        engine: of the run.
        steps: to record.
        folder: directory of the records.
    """
    from trainwright.extensions.recorded_values.extension import ValueRecorder

    args = hooks.args
    settings = {
        "seed": args.seed,
        "data_seed": args.data_seed,
        "precision": args.mixed_precision,
        "max_grad_norm": args.max_grad_norm,
        "device": str(engine.device),
        "torch": torch.__version__,
        "processes": args.world_size,
    }
    return ValueRecorder(
        steps,
        folder,
        engine,
        rank=args.process_index,
        num_processes=args.world_size,
        names=_names_of_data(hooks),
        settings=settings,
    )


def _ancestry(run: Any) -> list[Extension]:
    """Returns the extension of a branch, from its first start on; of a run that begins afresh none is looked for."""
    if run.checkpoint is None:
        return []
    from trainwright.run import branch

    if not run.begins_branch and not branch.origins_in(run.checkpoint):
        return []
    from trainwright.extensions.branch.extension import Ancestry

    return [Ancestry(branch.origin_of(run.checkpoint) if run.begins_branch else None)]


def evaluation_beside(
    run: Any, hooks: Any, engine: Engine, *, folder: str, freeze: Callable[[Path], None], rotate: Callable[[], None]
) -> list[Extension]:
    """Returns the extension through which another process evaluates for a run; none if they are not due, or wait.

    Args:
        run: which is about to begin.
        hooks: the trainer.
        engine: of the run.
        folder: where the run writes.
        freeze: writes the parts of the trainer that the other process needs; called when the model is ready.
        rotate: deletes checkpoints that the arguments no longer want.
    """
    args = hooks.args
    wanted = value_of(args, "eval_async")
    if not wanted or args.eval_strategy == "no":
        return []
    from trainwright.extensions.async_evaluation.evaluators import Watchers
    from trainwright.extensions.async_evaluation.extension import AsyncEvaluation

    def make_evaluator(requests: Requests) -> Evaluator:
        if wanted == WATCH:
            return Watchers(requests)
        limit_s = float(value_of(args, "hang_timeout")) or None
        return evaluation_process(freeze, requests, device=str(value_of(args, "eval_device")), limit_s=limit_s)

    return [
        AsyncEvaluation(
            folder,
            engine,
            hooks,
            make_evaluator=make_evaluator,
            skips=value_of(args, "eval_queue") == "skip",
            is_timed=resolve.checkpoint(args).max_train_s is not None,
            rotate=rotate,
        )
    ]


def evaluation_process(
    freeze: Callable[[Path], None], requests: Requests, *, device: str, limit_s: float | None = None
) -> Evaluator:
    """Returns the process that evaluates for a run, to be started; arguments as for `evaluation_beside`.

    `limit_s` is how long it may take for a batch, in seconds; None: hours.
    """
    from trainwright.extensions.async_evaluation.evaluators import EVALUATION_LIMIT_S, EvaluationProcess
    from trainwright.support.child_process import module_command, module_environment
    from trainwright.support.scratch import make_scratch_folder

    scratch = make_scratch_folder("evaluation")
    path = scratch / "trainer.pt"
    try:
        freeze(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    environment = module_environment(without_launcher(os.environ) | device_variables(device))
    command = module_command("trainwright.run.evaluation_process", str(path), str(os.getpid()))
    limit_s = EVALUATION_LIMIT_S if limit_s is None else limit_s
    return EvaluationProcess(command, environment, scratch=scratch, requests=requests, limit_s=limit_s)


def _guard(run: Any, hooks: Any, engine: Engine, *, record: Record, load_newest: Callable[[], int]) -> Any:
    """Returns the guard of a run; None if every update is made."""
    from trainwright.extensions.guard.diagnosis import find_bad_parts_anywhere
    from trainwright.extensions.guard.rollback import make_rollback
    from trainwright.extensions.guard.step_guard import make_guard

    args = hooks.args
    setup = run.setup
    plan = resolve.guard(args)
    stacked = engine.stacked if engine.num_replicas > 1 else None
    rollback = make_rollback(
        plan,
        setup.model,
        setup.optimizer,
        None if setup.follows_metrics(setup.scheduler) else setup.scheduler,
        load_newest=load_newest,
        samples_per_step=run.batch_size * engine.num_replicas * run.plan.micro_batches,
        is_possible=not engine.updates_in_clip,
    )

    def report(incident: Incident) -> None:
        is_counted = incident.step <= run.progress.state.global_step  # otherwise the loop counts it
        if is_counted and incident.action in ("skip", "rollback"):
            run.extensions.refuse(incident.step)
        setup.events.fire("on_incident", run.progress, incident=incident)

    def diagnose(optimizer: Optimizer) -> dict[str, str]:
        return find_bad_parts_anywhere(setup.model, optimizer, engine.gather_objects)

    return make_guard(
        plan,
        report,
        record=record,
        optimizer=setup.optimizer,
        device=engine.device,
        mean=None if stacked is None else lambda loss: stacked(loss).mean(),
        rollback=rollback,
        was_updated=(lambda: engine.step(setup.optimizer)) if engine.updates_in_clip else None,
        has_scaler=engine.scales_loss,
        knows_norm=engine.knows_norm,
        diagnose=diagnose,
        writes=args.should_save,
    )


def _followers_of_samples(
    run: Any, hooks: Any, engine: Engine, *, folder: str, settle_guard: Callable[[], None]
) -> list[Extension]:
    """Returns the extensions that track single samples: the ledger or losses by source, and a curriculum."""
    args = hooks.args
    dataset = hooks.train_dataset
    wanted = value_of(args, "ledger")
    is_stream = is_instance_of(dataset, "trainwright.data.streaming.mixture_stream", "MixtureStream")
    is_mixture = is_stream or is_instance_of(dataset, "trainwright.data.mixture", "MixtureDataset")
    curriculum = dataset.curriculum if is_mixture and not is_stream else None
    if dataset is None or not (wanted or is_mixture):
        return []
    from trainwright.extensions.ledger.sample_losses import SampleLosses

    samples = SampleLosses(
        run,
        engine,
        settle_guard=settle_guard,
        dataset=dataset,
        names=_names_of_data(hooks),
        smoothing=args.label_smoothing_factor,
        keeps_ledger=bool(wanted or curriculum),
        writes=args.should_save and bool(wanted),
        folder=folder,
    )
    if curriculum is None:
        return [samples]
    from trainwright.extensions.curriculum.extension import CurriculumRun

    keeps_ledger = bool(wanted)
    writes = args.should_save
    return [
        samples,
        CurriculumRun(dataset, run.loader, samples, engine, plan=run.plan, keeps_ledger=keeps_ledger, writes=writes),
    ]


def _nothing() -> None:
    """Does nothing: there is no guard to settle."""


def quarantine(run: Any, hooks: Any, samples: Iterable[Any], column: str | None) -> None:
    """Adds samples to the quarantine of the output directory and of the current run; see `Trainer.quarantine`."""
    from trainwright.extensions.quarantine.extension import Quarantine, exclude

    found = run.extensions.get(Quarantine.name)
    dataset = data_of(hooks)
    exclude(
        samples,
        column,
        dataset=dataset,
        names=row_names(dataset, id_column=resolve.id_column(hooks.args)),
        folder=output_path(hooks.args),
        writes=hooks.args.should_save,
        quarantine=found if isinstance(found, Quarantine) else None,
        loader=run.loader,
    )


def incident_recorder(run: Any, hooks: Any, engine: Engine, folder: str) -> IncidentRecorder:
    """Returns the incident recorder of the current run, or a new one outside of training."""
    from trainwright.extensions.incidents.recorder import IncidentRecorder

    found = run.extensions.get(IncidentRecorder.name)
    if isinstance(found, IncidentRecorder):
        return found
    return IncidentRecorder(hooks, run, engine, folder, names=_names_of_data(hooks))


def _names_of_data(hooks: Any) -> NamesOf:
    """Returns the names of the samples that a trainer trains on."""
    return NamesOf(hooks.train_dataset, id_column=resolve.id_column(hooks.args))


# -- a trainer --------------------------------------------------------------------------------------------------------


def arguments_of_trainer(args: Any, model: Model) -> Any:
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
        from trainwright.trackers.registry import get_reporting_integration_callbacks as find_trackers
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
def callbacks_of_a_run(handler: CallbackHandler, args: Any, folder: str) -> Iterator[None]:
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
        if value_of(args, "activation_checkpointing"):
            options = value_of(args, "activation_checkpointing_kwargs")
            enter(patches.checkpointed_activations(model, options, pins_memory=pins_memory_here()))
        if resolve.compiles_blocks(args):
            backend = args.torch_compile_backend
            mode = args.torch_compile_mode
            enter(patches.compiled_blocks(model, backend=backend, mode=mode))
        enter(noise)
        if (kernel := value_of(args, "loss_kernel")) is not None:
            from trainwright.support.loss_kernels import without_logits

            runs_triton = kind_of(engine.device).runs_triton
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
    behaviour = behaviour_of(args)
    weighting = value_of(args, "loss_weighting")
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


def loss_question(run: Any, hooks: Any, engine: Engine, *, folder: str, show: Callable[[str], None]) -> list[Extension]:
    """Returns the extension that finds out whether the user's own loss is a mean; none if it is known, or the same.

    It is the same in one process if no window has several micro-batches, or parts of one.
    """
    args = hooks.args
    is_alone = engine.num_parts_of_batch == engine.num_replicas == 1
    may_have_several = run.plan.micro_batches > 1 or args.auto_find_batch_size
    may_have_several = may_have_several or is_overridden(hooks, "get_batch_samples")
    may_have_several = may_have_several or has_hook(hooks, "prepare_window", num_arguments=1)
    if not run.loss_rule.is_open or (is_alone and not may_have_several):
        return []
    from trainwright.extensions.loss_question.extension import LossQuestion

    core = model_facts.core_model(hooks.model)
    functions = [hooks.compute_loss, hooks.compute_loss_func, type(core).forward]
    if is_overridden(hooks, "compute_loss"):
        subject = f"compute_loss of {type(hooks).__name__}"
    elif hooks.compute_loss_func is not None:
        subject = "compute_loss_func"
    else:
        subject = type(core).__name__
    return [
        LossQuestion(
            run,
            hooks,
            engine,
            functions=functions,
            subject=subject,
            weighting=value_of(args, "loss_weighting"),
            factor=args.gradient_accumulation_steps * engine.num_replicas,
            folder=folder,
            show=show,
        )
    ]


def loss_note(model: Model, args: Any, run: Any) -> str:
    """Returns what the lines at the start of a run say about its loss; "" where there is nothing to say."""
    question = run.extensions.get("loss_question")
    note: str = getattr(question, "note", "")
    return note or note_of_mean(model, args, run.loss_rule)


def note_of_mean(model: Model, args: Any, rule: LossRule) -> str:
    """Returns a note if a run divides a model's loss that transformers would add up as means; "" otherwise."""
    factor = args.gradient_accumulation_steps * rule.num_processes
    if factor == 1 or not rule.weights_items or value_of(args, "loss_weighting") is not None:
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
        return gather_results(value, engine.objects_of_replicas)

    return EvalContext(
        plan=resolve.evaluation(args),
        events=events,
        gather=gather,
        gather_objects=None if engine.num_replicas == 1 else engine.objects_of_replicas,
        total=engine.sum,
        collect=engine.stacked,
        batch_size=args.eval_batch_size,
        device=engine.device,
        compute_metrics=compute_metrics,
        needs_labels=not is_prediction,
        keeps_results=is_prediction or not streams,
        **parts,
    )
