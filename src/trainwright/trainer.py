"""Trainer: one flat class with the hooks that the loops call, in the order of the calls.

Each hook is short and calls a component. State of one `train()` call is in `run.run.Run`, state of this process in
`run.services.Services`.

The loop is `_inner_training_loop` (epochs), `_run_epoch` (steps) and `_train_on` (micro-batches, then the update).
`steps()` yields the same steps, from the same generators, to a loop of the user. `train()` does not iterate over
`steps()` itself: an override of `_run_epoch` is called for each epoch, and returns before the next epoch begins.

`loop/fit.py` asks `get_batch_samples` for the window of a step; `loop/step.py` calls `_clip_grad_norm`,
`_get_grad_norm` and the engine's step; `_maybe_log_save_evaluate` follows.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from trainwright._types import TRAINER_STATE_NAME, Batch, TailBatch, has_length, metric_number, output_loss
from trainwright.capability_table import find_method, load_service
from trainwright.checkpoint import training_state
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import resolve
from trainwright.config.behaviour import get_behaviour
from trainwright.config.coerce import output_path
from trainwright.config.fields import get_value
from trainwright.data import bad_sample, columns, length_sampler, sources
from trainwright.data.row_names import ONE_SOURCE, NamesOf
from trainwright.distributed.pending import PendingScalar
from trainwright.engine.base import NO_CONTEXT
from trainwright.engine.precision import DTYPES, eval_precision
from trainwright.errors import DataError, EvaluationMemoryError, warn_older_name
from trainwright.evaluation import outputs as results
from trainwright.evaluation.outputs import EvalLoopOutput, PredictionOutput, TrainOutput
from trainwright.loop.driven import DrivenSteps, DrivePasses, StepResult, make_result
from trainwright.loop.extension import Extension
from trainwright.loop.fit import epochs, iterate_steps, saving_last_step
from trainwright.loop.step import Step
from trainwright.optim import schedules
from trainwright.optim.parameter_groups import NO_DECAY_LAYERS, NO_DECAY_PATTERNS, get_parameter_names
from trainwright.run import (
    build,
    checkpointing,
    checks,
    console,
    input_pipeline,
    loss_rules,
    resume,
    run_callbacks,
    train,
)
from trainwright.run.adoption import DerivedFacts
from trainwright.run.checkpointing import Checkpointer
from trainwright.run.parts import Parts, find_own_class, with_parts
from trainwright.run.pickling import make_state, restore
from trainwright.run.published import declarable, owned_by
from trainwright.run.refusal import unchanged_if_refused, with_known_keywords
from trainwright.run.run import Run
from trainwright.run.services import NoSearch, NoUploads, Services
from trainwright.state.progress import BACKWARD, EVALUATION, FORWARD, HOST_TO_DEVICE, LOGGING, SAVING, WAITING
from trainwright.state.recorded_metrics import METRICS
from trainwright.state.throughput import count_tokens, speed_metrics, step_logs, utilisation
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support import model_facts, model_modes
from trainwright.support.clean_stack import import_compiler
from trainwright.support.hooks import (
    Stateful,
    accept_older_signatures,
    is_overridden,
    missing_names,
    takes_metrics_too,
    takes_no_grad_norm_too,
)
from trainwright.support.loss_normalization import LossOutput, LossRule
from trainwright.support.replaced import current, watch
from trainwright.support.tensor_tree import count_samples

if TYPE_CHECKING:
    from trainwright.capabilities.recorded_values.value_comparison import ValuesReport
    from trainwright.preflight.check_registry import CheckReport
    from trainwright.preflight.prove import ProofReport
    from trainwright.search.base import BestRun

Items = torch.Tensor | int | None


class Trainer:
    """Trains and evaluates a model.

    Args:
        model (PreTrainedModel | nn.Module): a `PreTrainedModel`, a PEFT model, or any `nn.Module` that returns a dict,
            a ModelOutput, or a tuple with the loss first.
        args (TrainingArguments): the settings; default `TrainingArguments("tmp_trainer")`.
        data_collator (Callable[[list], dict]): turns a list of samples into a batch; by default it pads with
            `processing_class`, or stacks.
        train_dataset (Dataset | IterableDataset | dict[str, Dataset]): samples to train on; map-style, iterable, or a
            `datasets.Dataset`; or a dict of several datasets by name, which are mixed (`args.mixture`).
        eval_dataset (Dataset | dict[str, Dataset]): samples to evaluate on, or a dict of several sets by name.
        processing_class (PreTrainedTokenizerBase | ProcessorMixin): tokenizer, image processor, feature extractor or
            processor; saved with the model.
        model_init (Callable[..., nn.Module]): makes the model; called by each `train()`. Takes no argument, or the
            trial of a search.
        compute_loss_func (Callable[..., torch.Tensor]): `(outputs, labels, num_items_in_batch) -> loss`, in place of
            the model's own.
        compute_metrics (Callable[[EvalPrediction], dict]): turns an `EvalPrediction` into a dict of numbers.
        callbacks (list[TrainerCallback]): classes or instances, in addition to the default ones.
        optimizers (tuple[Optimizer, LRScheduler]): an optimizer and a schedule of your own; None for the default that
            the arguments name.
        optimizer_cls_and_kwargs (tuple[type[Optimizer], dict]): an optimizer class and its arguments; it is given the
            parameter groups for weight decay.
        preprocess_logits_for_metrics (Callable[..., torch.Tensor]): `(logits, labels) -> logits`, applied to each batch
            before it is stored.
        tokenizer (PreTrainedTokenizerBase): older name of `processing_class`.

    Raises:
        MissingModelError, ModelError: no model, both `model` and `model_init`, or a model without a head.
        DataError: the settings are impossible with this data, or without data.
        ArgumentError: settings that contradict each other.

    Example:
        >>> trainer = Trainer(model=model, args=TrainingArguments("out"), train_dataset=samples)
        >>> trainer.train()
    """

    loss_is_scaled_for_ga: bool | None = None
    """Whether `compute_loss` returns a loss scaled for the whole window. True: used as it is; False: a mean per
    micro-batch; None (default): as the model is known to do with `num_items_in_batch`, or, for a loss of your own, as
    is found at the first micro-batch.
    """

    columns: Sequence[str] = ()
    """Columns of the data to keep, in place of the arguments of `forward`. Columns that a collator lists in its
    `required_columns` are kept too. A name that is missing from the training data is an error before step 1; other data
    may lack labels.
    """

    # -- published attributes that the run or this process owns --------------------------------------------------------

    state: TrainerState = owned_by("_trainwright.run.progress", "state")
    control: TrainerControl = owned_by("_trainwright.run.progress", "control")
    current_flos: float = owned_by("_trainwright.run.progress", "flos")
    is_in_train: bool = owned_by("_trainwright.run", "is_training")
    # Whether the model is given `num_items_in_batch`. Whoever assigns it says whether it divides by the number.
    model_accepts_loss_kwargs: bool = declarable("accepts_loss_kwargs", flag="declares_loss_kwargs")
    neftune_hook_handle: Any = owned_by("_trainwright.run", "noise_handle")
    _trial: Any = owned_by("_trainwright.run", "trial")
    _tr_loss: torch.Tensor = owned_by("_trainwright.run.progress.meter", "total")
    _total_loss_scalar: float = owned_by("_trainwright.run.progress", "total_loss")
    _globalstep_last_logged: int = owned_by("_trainwright.run.progress", "step_last_logged")

    accelerator: Any = owned_by("_trainwright.services.engine", "accelerator")
    gather_function: Any = owned_by("_trainwright.services", "gather_function")
    callback_handler: Any = owned_by("_trainwright.services", "callback_handler")
    deepspeed: Any = owned_by("_trainwright.services.flags", "deepspeed")
    is_deepspeed_enabled: bool = owned_by("_trainwright.services.flags", "is_deepspeed_enabled")
    is_fsdp_enabled: bool = owned_by("_trainwright.services.flags", "is_fsdp_enabled")
    is_fsdp_xla_enabled: bool = owned_by("_trainwright.services.flags", "is_fsdp_xla_enabled")
    is_fsdp_xla_v1_enabled: bool = owned_by("_trainwright.services.flags", "is_fsdp_xla_v1_enabled")
    is_fsdp_xla_v2_enabled: bool = owned_by("_trainwright.services.flags", "is_fsdp_xla_v2_enabled")
    push_in_progress: Any = owned_by("_trainwright.services.uploads", "in_progress")
    hp_search_backend: Any = owned_by("_trainwright.search", "name")
    hp_name: Any = owned_by("_trainwright.search", "hp_name")
    hp_space: Any = owned_by("_trainwright.search", "space")
    compute_objective: Any = owned_by("_trainwright.search", "compute_objective")
    objective: Any = owned_by("_trainwright.search", "objective")
    _memory_tracker: Any = owned_by("_trainwright.services", "memory_tracker")
    _eval_dataloaders: dict[str, Any] = owned_by("_trainwright.services", "eval_dataloaders")

    checkpoint_items: dict[str, Stateful]
    """Further objects, by name, to save and restore with every checkpoint. Each has `state_dict` and `load_state_dict`;
    its state consists of tensors, numbers, strings and None. Add them before training begins.
    """

    # Any: models, datasets, processing classes and arguments are the user's own types.
    _trainwright: Parts
    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    hub_model_id: str | None = None

    # -- construction --------------------------------------------------------------------------------------------------

    @with_known_keywords
    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        with unchanged_if_refused(self):
            checks.check_models(model, model_init)
            self.args = build.apply_arguments(args, model)
            own = self._trainwright = Parts()
            own.methods = find_own_class(type(self))
            own.services = Services.for_arguments(self.args)
            own.services.memory_tracker.start("init")
            own.run = Run.idle(self.args)
            own.search = NoSearch()  # or a Searching
            own.extensions = []

            # The user's objects.
            self.model = model
            self.model_init = model_init
            makes_loader = not is_overridden(self, "get_train_dataloader")  # an override may accept a dict
            self.train_dataset = sources.adapt_data(train_dataset) if makes_loader else train_dataset
            self.eval_dataset = eval_dataset
            self.processing_class = build.one_processing_class(processing_class, tokenizer)
            self.compute_loss_func = compute_loss_func
            self.compute_metrics = compute_metrics
            self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
            self.optimizer, self.lr_scheduler = optimizers
            self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
            default = columns.default_collator(self.processing_class, self.args, given=data_collator)
            own.default_collator = default
            self.data_collator = default if data_collator is None else data_collator

            # The model on its device.
            self._train_batch_size = self.args.train_batch_size
            self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
            self._signature_columns: list[str] | None = None
            self.checkpoint_items: dict[str, Stateful] = {}
            self._created_lr_scheduler = False
            self.create_accelerator_and_postprocess()
            model = self.call_model_init() if model is None else model
            checks.check_head(model)
            facts = DerivedFacts.derive(self.args, model)
            self.is_model_parallel = facts.is_model_parallel
            self.place_model_on_device = facts.place_model_on_device
            own.accepts_loss_kwargs = facts.model_accepts_loss_kwargs
            # a class attribute of a subclass takes the place of the property
            own.declares_loss_kwargs = not isinstance(type(self).model_accepts_loss_kwargs, property)
            if own.declares_loss_kwargs:
                own.accepts_loss_kwargs = bool(self.model_accepts_loss_kwargs)
            self.can_return_loss = facts.can_return_loss
            self.label_names = facts.label_names
            own.services.adoption.note_facts(facts)
            own.methods._adopt_model(self, model)
            self.label_smoother = loss_rules.label_smoother(model, self.args.label_smoothing_factor)

            # Invalid combinations are refused first; then callbacks, repository and directory are opened.
            self._validate_args()
            Trainer._use_callbacks(self, callbacks)
            if self.args.push_to_hub:
                Trainer._open_repository(self)
            if self.args.should_save:
                checks.make_output_dir(output_path(self.args))
            self.state = Trainer._fresh_state(self)
            self.callback_handler.fire("on_init_end", self._trainwright.run.progress)
            self._trainwright.services.memory_tracker.stop_and_update_metrics(stage="init")

    # Pickling and copying: a deep copy gets its own engine and other services, a shallow copy shares them.
    __getstate__ = make_state
    __setstate__ = restore
    __copy__ = with_parts

    def _validate_args(self) -> None:
        """Refuses combinations of the constructor's arguments with which nothing can be trained."""
        optimizers = (self.optimizer, self.lr_scheduler)
        checks.check_optimizers(self.args, optimizers, self.optimizer_cls_and_kwargs, self.model_init)
        has_own_schedule = self.lr_scheduler is not None
        checks.check_datasets(
            self.args, self.train_dataset, self.eval_dataset, self.data_collator, has_own_schedule=has_own_schedule
        )
        checks.check_metrics(self.args, self.compute_metrics)

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the engine, and with it `accelerator`."""
        if is_overridden(self, "_build_accelerator_args"):
            self._build_accelerator_args(dataloader_config=self.args.accelerator_config)
        checks.warn_hooks_without_effect(self)
        self._trainwright.services.use_engine(build.make_engine(self.args, self.model))

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Returns what the original gives to accelerate; an override is called, but its result has no effect.

        Args:
            **kwargs: entries of the result, by name.

        Returns:
            Name -> value.
        """
        precision = getattr(self.args, "mixed_precision", "no")
        plugins: dict[str, Any] = {"deepspeed_plugin": None, "fsdp_plugin": None, "kwargs_handlers": []}
        return {"mixed_precision": precision, **plugins, **kwargs}

    def call_model_init(self, trial: Any = None) -> Any:
        """Makes a new model with `model_init`.

        Args:
            trial: the trial of a search, for a `model_init` that takes one.

        Returns:
            The model, where `model_init` put it.
        """
        assert self.model_init is not None
        return build.call_model_init(self.model_init, trial)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Moves the model to the training device, unless its parts are placed already (`hf_device_map`).

        Args:
            model: the model; moved in place.
            device: as in the original's signature; the engine decides.
        """
        if getattr(model, "hf_device_map", None) is None:
            self._trainwright.services.engine.place(model)

    def _adopt_model(self, model: Any) -> None:
        """Prepares a model for training: the given model, and each model that `model_init` makes."""
        is_configured = Trainer._should_configure(self, model)
        if self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)
        self.model = self.model_wrapped = model
        self._trainwright.services.adoption.note_model(model)
        if is_configured and getattr(model, "config", None) is not None:
            model.config.use_cache = self.args.use_cache

    def _should_configure(self, model: Any) -> bool:
        """Returns whether the model, which is taken over next, gets the settings that the arguments have for it."""
        is_new = self.model is not None and self.model is not model
        return not is_new or get_behaviour(self.args).configures_new_models

    def _use_callbacks(self, callbacks: list[Any] | None) -> None:
        """Makes the handler: default callbacks, trackers, and these."""
        parts = {"model": self.model, "processing_class": self.processing_class, "optimizer": self.optimizer}
        engine = self._trainwright.services.engine
        writer = self._trainwright.services.writer
        schedule = self.lr_scheduler
        handler = run_callbacks.make_callbacks(
            self.args, callbacks, engine=engine, writer=writer, lr_scheduler=schedule, **parts
        )
        if self.args.enable_jit_checkpoint:
            for callback in run_callbacks.untied_jit_callbacks(handler):
                callback.set_trainer(self)
        self._trainwright.services.use_callbacks(handler, self._trainwright.run.progress.clock)

    def _fresh_state(self) -> TrainerState:
        return current("TrainerState", TrainerState)(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=Trainer._stateful(self),
        )

    def _stateful(self) -> list[Any]:
        return checkpointing.stateful(self.callback_handler, self.control)

    @property
    def tokenizer(self) -> Any:
        """Older name of `processing_class`."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    def is_local_process_zero(self) -> bool:
        """Returns whether this is the main process of this machine."""
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """Returns whether this is the main process of all."""
        return bool(self.args.process_index == 0)

    def add_callback(self, callback: Any) -> None:
        """Adds a callback.

        Args:
            callback: a `TrainerCallback`, or a class, which is instantiated.
        """
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback and returns it; None if it is not there.

        Args:
            callback: the instance, or its class (the first of that class).

        Returns:
            The callback, or None.
        """
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback.

        Args:
            callback: the instance, or its class (the first of that class).

        Raises:
            ValueError: the instance is not there.
        """
        self.callback_handler.remove_callback(callback)

    def add_extension(self, extension: Extension) -> None:
        """Adds an extension.

        It takes part in the next run and all later ones, and its state is saved in their checkpoints.

        Args:
            extension: an `Extension`; extensions run by ascending `order`.

        Raises:
            ArgumentError: it has no name or the name of another extension, or a run is under way.

        Example:
            >>> class CountTokens(Extension):
            ...     name = "tokens"
            ...     total = 0
            ...     def micro_batch(self, batch):
            ...         self.total += batch.inputs["input_ids"].numel()
            ...     def log(self):
            ...         return {"tokens_seen": self.total}
            >>> trainer.add_extension(CountTokens())
        """
        checks.check_extension(extension, self._trainwright.extensions, is_training=self._trainwright.run.is_training)
        self._trainwright.extensions = [
            *self._trainwright.extensions,
            extension,
        ]  # a shallow copy of the trainer keeps its own list

    def remove_extension(self, extension: Extension) -> None:
        """Removes an extension from the runs to come.

        Args:
            extension: as given to `add_extension`; ignored if it is not there.
        """
        self._trainwright.extensions = [one for one in self._trainwright.extensions if one is not extension]

    # -- train() -------------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        model_path: str | None = None,
    ) -> TrainOutput:
        """Trains the model.

        Args:
            resume_from_checkpoint: directory of a checkpoint; True for the newest complete one in `output_dir`;
                "auto" for the newest checkpoint if there is one, else a fresh start; None for
                `args.resume_from_checkpoint`, `args.branch_from`, or a fresh start.
            trial: a trial of a hyperparameter search; outside of a search, it is only passed to `model_init`.
            ignore_keys_for_eval: entries of the model's output that are not predictions.
            model_path: older name of `resume_from_checkpoint`.

        Returns:
            The optimizer steps of the whole run, the mean loss of this call, and the metrics (run time in seconds).

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged or of another run.
            NestedCallError: this trainer is already training, for example if a callback calls it.
        """
        if model_path is not None:
            warn_older_name("model_path", "resume_from_checkpoint")
            resume_from_checkpoint = model_path
        with train.training(self, resume_from_checkpoint, trial) as checkpoint:
            checks.check_not_frozen(self.model, self.callback_handler.callbacks, self)
            return self._inner_training_loop(
                batch_size=self._train_batch_size,
                args=self.args,
                resume_from_checkpoint=None if checkpoint is None else str(checkpoint),
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Runs a whole training, from the dataloader to the final metrics; a wrapper around it sees all of it.

        Args:
            batch_size: samples of a micro-batch, per device; default `_train_batch_size`.
            args: the settings; default `self.args`.
            resume_from_checkpoint: directory of a verified checkpoint; the model has its weights already.
            trial: of a search.
            ignore_keys_for_eval: entries of the model's output that are not predictions.

        Returns:
            Steps trained, mean loss of training, and its metrics by name.
        """
        args = self.args if args is None else args
        self._train_batch_size = self._train_batch_size if batch_size is None else batch_size
        if args.auto_find_batch_size:
            self._update_auto_batch_size(self._train_batch_size)
        checkpoint = None if resume_from_checkpoint is None else self._trainwright.run.opened(resume_from_checkpoint)
        train.begin_training(self, args, checkpoint, trial, ignore_keys_for_eval)
        run = self._trainwright.run
        with saving_last_step(run, self):
            for epoch in epochs(run, self, eval_on_start=args.eval_on_start):
                self._run_epoch(
                    model=run.setup.model,
                    epoch=epoch,
                    train_dataloader=run.loader,
                    steps_in_epoch=run.plan.batches_per_epoch,
                    num_update_steps_per_epoch=run.plan.steps_per_epoch,
                    trial=trial,
                    ignore_keys_for_eval=ignore_keys_for_eval,
                    start_time=run.progress.beginning.time,
                    resume_from_checkpoint=run.start.checkpoint,
                    epochs_trained=run.start.epoch,
                    steps_trained_in_current_epoch=run.start.batches,
                )
        return self._finalize_training(trial, run.plan.num_train_samples, run.progress.beginning.time)

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        """Trains one epoch, or the rest of one after a resume.

        The signature is the original's. What belongs to one run (`trial`, `start_time`, how much of the first epoch is
        done) is read from its `Run`.

        Args:
            model: the model as the engine has wrapped it.
            epoch: epoch, from 0.
            train_dataloader: the loader of the training data.
            steps_in_epoch: micro-batches of a whole epoch.
            num_update_steps_per_epoch: optimizer steps of a whole epoch.
            trial: trial of a search, or None.
            ignore_keys_for_eval: entries of the model's output to exclude from evaluations.
            start_time: when training began, in seconds since 1970.
            resume_from_checkpoint: folder of the checkpoint, or None.
            epochs_trained: epoch that the call to `train` began with.
            steps_trained_in_current_epoch: micro-batches of that epoch that were done before.
        """
        for step in Trainer._iterate_steps(self, epoch):
            Trainer._train_on(self, step)

    def _iterate_steps(self, epoch: int) -> Iterator[Step]:
        """Yields the steps of an epoch, or its remaining steps after a resume; recounted if samples were excluded."""
        run = self._trainwright.run
        train.check_replaced(self)
        run.begin_epoch()
        if run.is_recount_due:
            run.apply_recount(epoch, None)
        return iterate_steps(run, self, epoch)

    def _train_on(self, step: Step) -> None:
        """Trains one optimizer step: forward and backward of each micro-batch, then the update."""
        while not step.is_over:  # again with smaller micro-batches if they did not fit into memory
            try:
                for batch in step.micro_batches:
                    step.add(self.training_step(step.model, batch, step.num_items))
                step.update()
            except RuntimeError as error:
                if not step.retries_smaller(error):
                    raise

    def steps(
        self, resume_from_checkpoint: str | bool | None = None, ignore_keys_for_eval: list[str] | None = None
    ) -> DrivenSteps[TrainOutput]:
        """Trains in a loop of your own: yields the optimizer steps that `train()` would run.

        Logs, guards, checkpoints, evaluations, callbacks, signals and resuming work as in `train()`; the forward and
        backward passes are in your loop. Leaving the loop early ends the run there: callbacks get `on_train_end`, but
        there is no final log. `trainer.control.should_training_stop = True` ends it in order.
        In `with trainer.steps() as steps:` the run also learns of an error in your loop, and ends as `train()` would.

        Args:
            resume_from_checkpoint: as for `train`.
            ignore_keys_for_eval: as for `train`.

        Returns:
            An iterator over steps (`loop.driven.DrivenStep`); after the end, its `output` is the return value of
            `train()`.

        Raises:
            ArgumentError: `auto_find_batch_size`, which would have to repeat your loop's forward passes, or a subclass
                overrides the loop itself. Raised by the first step, as all errors that `train()` raises.
            NestedCallError: this trainer is training already.
            StepOrderError: the methods of a step were called in the wrong order (see the example).

        Example:
            >>> for step in trainer.steps():
            ...     for batch in step.batches:
            ...         loss = trainer.compute_loss(step.model, batch, num_items_in_batch=step.num_items)
            ...         step.backward(loss)
            ...     step.update()
        """
        self._trainwright.run.check_not_training("steps")
        checks.check_drives_itself(self, "steps", self.args)
        return DrivenSteps(train.drive(self, resume_from_checkpoint, ignore_keys_for_eval), self, PASSES)

    def fit_step(self, resume_from_checkpoint: str | bool | None = None) -> StepResult | None:
        """Trains one optimizer step; the first call begins the run that `train()` would make.

        To end the run early, set `trainer.control.should_training_stop = True` and call it once more.

        Args:
            resume_from_checkpoint: as for `train`; read by the first call of a run.

        Returns:
            The step's number, loss (detached, on the device), norm of gradients and learning rate; None when the run
            has ended, and from then on until `train()` or `steps()` begins another one.

        Raises:
            ArgumentError: a subclass overrides the loop itself (`_inner_training_loop` or `_run_epoch`).
            NestedCallError: this trainer is running `train()` or a loop over `steps()`.

        Example:
            >>> while (result := trainer.fit_step()) is not None:
            ...     print(result.step)
        """
        steps = self._trainwright.run.driven_steps
        if steps is None:
            self._trainwright.run.check_not_training("fit_step")
            checks.check_drives_itself(self, "fit_step", self.args)
            steps = DrivenSteps(train.drive(self, resume_from_checkpoint, None), self, PASSES)
        while True:
            step = steps.next_or_none()
            self._trainwright.run.driven_steps = steps  # the current run, or the idle run after it
            if step is None:
                return None
            with steps.ending_by_error():
                Trainer._train_on(self, step)
            if (result := make_result(step)) is not None:
                return result

    @property
    def neftune_noise_alpha(self) -> float | None:
        """Noise added to the input embeddings in training, as set in the arguments."""
        alpha: float | None = self.args.neftune_noise_alpha
        return alpha

    @neftune_noise_alpha.setter
    def neftune_noise_alpha(self, value: float | None) -> None:
        self.args.neftune_noise_alpha = value

    def _activate_neftune(self, model: Any) -> Any:
        """Adds noise to the input embeddings (NEFTune) from now on; called in a run with `neftune_noise_alpha`.

        Args:
            model: the model, wrapped or not.

        Returns:
            The model.
        """
        from trainwright.support.patches import add_noise_to_embeddings

        assert self.neftune_noise_alpha is not None
        self._trainwright.run.noise_handle = add_noise_to_embeddings(model, self.neftune_noise_alpha)
        return model

    def _deactivate_neftune(self, model: Any) -> None:
        """Undoes `_activate_neftune`.

        Args:
            model: as given to `_activate_neftune`.
        """
        self._trainwright.run.noise_handle.remove()
        self._trainwright.run.noise_handle = None

    # -- data ----------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns this process's training data in batches, in training order.

        Raises:
            DataError: there is no `train_dataset`.
            ArgumentError: the names in `mixture` differ from the dataset names in `train_dataset`.
        """
        if self.train_dataset is None:
            raise DataError("Training needs a train_dataset; pass one to Trainer.")
        self.train_dataset = checks.adapt_train_data(
            self.args, self.train_dataset
        )  # it may have been assigned since construction
        return self._get_dataloader(
            self.train_dataset, "Training", self._train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Returns the loader for an evaluation.

        With `dataloader_persistent_workers`, a dataset keeps its loader.

        Args:
            eval_dataset: a dataset, its name in `self.eval_dataset`, or None for `self.eval_dataset` itself.

        Returns:
            The loader of this process.

        Raises:
            DataError: there is no dataset.
        """
        if eval_dataset is None and self.eval_dataset is None:
            raise DataError("Evaluation needs an eval_dataset; pass one to Trainer or to evaluate().")
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        # otherwise a single loader for all unnamed sets
        has_one_each = get_behaviour(self.args).keeps_eval_loader_per_dataset
        is_own = dataset is self.eval_dataset or not has_one_each
        key = "eval" if is_own else "other"
        if isinstance(dataset, str):
            key = dataset
            dataset = self.eval_dataset[dataset]
        kept = self._eval_dataloaders.get(key) if self.args.dataloader_persistent_workers else None
        if kept is not None and (not has_one_each or getattr(kept, "source", dataset) is dataset):
            return kept  # type: ignore[no-any-return]
        size = self.args.eval_batch_size
        return self._get_dataloader(dataset, "Evaluation", size, self._get_eval_sampler, dataloader_key=key)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Returns the loader for data to predict on.

        Args:
            test_dataset (Dataset): samples, with or without labels.

        Returns:
            The loader of this process.
        """
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """Makes a dataloader for training, evaluation or prediction.

        Args:
            dataset: its samples.
            description: purpose of the data, for messages.
            batch_size: samples of a batch, per device.
            sampler_fn: from the dataset to its order.
            is_training: whether to reshuffle each epoch and give every process the same number of batches.
            dataloader_key: the key to reuse it by in the next evaluation, with `dataloader_persistent_workers`.

        Returns:
            The loader of this process; its length is in batches, if the data has a length.
        """
        checks.check_is_dataset(dataset, description)
        source = dataset
        names = NamesOf(
            dataset,
            id_column=resolve.id_column(self.args),
            source=ONE_SOURCE if is_training else dataloader_key or "eval",
        )
        is_columnar = columns.is_columnar(dataset) and dataset.format["type"] != "custom"
        if is_columnar and not get_behaviour(self.args).reads_length_column_before_removal:
            dataset = self._remove_unused_columns(dataset, description=description)
        # The order comes first: the model does not take a column of lengths.
        length_of = input_pipeline.length_input(self.processing_class)
        model = self.model
        with bad_sample.naming_numbers(names.text):
            sampler = input_pipeline.choose_sampler(
                dataset, sampler_fn, self.args, length_of=length_of, batch_size=batch_size, is_training=is_training
            )
        collate = input_pipeline.sample_collator(
            sampler, self.data_collator, default=self._trainwright.default_collator
        )
        if is_columnar:
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            dataset = columns.remove_from_sources(dataset, self._remove_unused_columns, description)
            collate = self._get_collator_with_removed_columns(collate, description=description)
        collate = input_pipeline.row_collator(self.args, sampler, collate, model, self.processing_class)
        how = {"sampler": sampler, "collate": collate, "batch_size": batch_size, "is_training": is_training}
        dataloader = input_pipeline.make_dataloader(dataset, self.args, self._trainwright.services.engine, **how)
        dataloader.sample_name = names.text
        if is_training:
            self._trainwright.run.start_in_its_epoch(dataloader)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            dataloader.source = source
            self._eval_dataloaders[dataloader_key] = dataloader
        return dataloader  # type: ignore[no-any-return]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Returns the order of the training samples; a RandomSampler shuffles by seed and epoch.

        Args:
            train_dataset: default `self.train_dataset`.

        Returns:
            A `Sampler` of indices; None for a stream.
        """
        dataset = self.train_dataset if train_dataset is None else train_dataset
        length_of = input_pipeline.length_input(self.processing_class)
        size = self._train_batch_size
        num_processes = self._trainwright.services.engine.num_replicas
        return input_pipeline.train_sampler(self.args, dataset, length_of, batch_size=size, num_processes=num_processes)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Returns the order of evaluation samples; None for a stream.

        Args:
            eval_dataset: the evaluation data.

        Returns:
            A `Sampler` over the indices, in the order of the data; None without a length.
        """
        if isinstance(eval_dataset, IterableDataset) or not has_length(eval_dataset):
            return None
        length_of = input_pipeline.length_input(self.processing_class)
        names = ("get_eval_dataloader", "get_test_dataloader", "evaluation_loop", "prediction_loop")
        sampler = input_pipeline.evaluation_by_length(
            self.args, eval_dataset, length_of, has_own_loop=is_overridden(self, *names)
        )
        return sampler or current("SequentialSampler", SequentialSampler)(eval_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        """Sets `_signature_columns`: `columns`, or the arguments of `forward` and the labels.

        The columns that the collator requires are added.
        """
        train.follow_model(self)
        if self._signature_columns is None:
            takes_labels_out = self.compute_loss_func is not None or self.label_smoother is not None
            labels = self.label_names or (["labels"] if takes_labels_out else [])
            names = list(columns.read_class_columns(self)) or model_facts.signature_columns(self.model, labels)
            self._signature_columns = list(dict.fromkeys([*names, *columns.named_columns(self, self.data_collator)]))
            self._trainwright.services.adoption.note_columns(self._signature_columns)

    def _named_columns(self, description: str | None) -> dict[str, str]:
        """Returns the columns that the data must have, each with the setting that names it."""
        labels = () if description == "Training" else self.label_names
        named = columns.named_columns(self, self.data_collator)
        return {name: who for name, who in named.items() if name not in labels}

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Returns the data without the columns that `forward` does not take.

        Args:
            dataset: a `datasets.Dataset`.
            description: name of the data in the message, such as "training".

        Returns:
            The dataset with the columns that are used; the same object if `remove_unused_columns=False`.

        Raises:
            DataError: no column is left.
        """
        if input_pipeline.keeps_all_columns(self.args, self.model, columns.read_class_columns(self)):
            return dataset
        columns.check_named(Trainer._named_columns(self, description), dataset.column_names, description)
        self._set_signature_columns_if_needed()
        kept: Any = self._signature_columns
        name = type(self.model).__name__
        is_own = columns.is_own(self.data_collator)
        return columns.remove_unused(dataset, kept, model_name=name, description=description, for_own=is_own)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Returns the collator, given only the entries of each sample that `forward` takes.

        Args:
            data_collator: samples (list) -> batch.
            description: name of the data in the message, such as "training".

        Returns:
            A collator; the same object if `remove_unused_columns=False`.
        """
        if input_pipeline.keeps_all_columns(self.args, self.model, columns.read_class_columns(self)):
            return data_collator
        self._set_signature_columns_if_needed()
        kept: Any = self._signature_columns
        name = type(self.model).__name__
        named = Trainer._named_columns(self, description)
        collator = current("RemoveColumnsCollator", columns.RemoveColumnsCollator)
        return collator(data_collator, kept, columns.module_logger, name, description, named)

    def num_examples(self, dataloader: Any) -> int:
        """Counts the samples behind a dataloader that are not in quarantine.

        Estimates the number if there is no length.

        Args:
            dataloader: any iterable of batches.

        Returns:
            Samples of one epoch, over all processes.
        """
        dataset = getattr(dataloader, "dataset", None)
        if has_length(dataset):
            return length_sampler.num_samples(dataloader)
        return int(len(dataloader) * self.args.per_device_train_batch_size)

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Counts the input tokens in a dataloader, without reading it if the lengths are known.

        Args:
            train_dl: yields batches with `input_ids`.
            max_steps: instead, the tokens of the first batch times this number.

        Returns:
            Tokens.
        """
        known = length_sampler.num_tokens(train_dl) if max_steps is None else None
        if known is not None:
            return known
        batches = train_dl if max_steps is None else islice(train_dl, 1)
        return sum(int(batch["input_ids"].numel()) for batch in batches) * (1 if max_steps is None else max_steps)

    # -- length of a run -----------------------------------------------------------------------------------------------

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, float, int, int | None, int]:
        """Returns the lengths of a run.

        Args:
            args: the settings.
            dataloader: the training data; without a length the run may end with the data.

        Returns:
            Epochs, optimizer steps per epoch, samples, samples trained, samples of a step over all processes,
            micro-batches per epoch, optimizer steps.
        """
        known = has_length(dataloader)
        return resolve.lengths(
            args,
            num_batches=len(dataloader) if known else None,
            num_examples=self.num_examples(dataloader) if known else None,
            total_batch_size=input_pipeline.samples_per_step(dataloader, args) or self.get_total_train_batch_size(args),
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the number of samples per optimizer step, over all processes that have data of their own.

        Args:
            args: arguments of the run, a `TrainingArguments`.

        Returns:
            Batch size per device x accumulation steps x data-parallel processes.
        """
        replicas = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return int(self._train_batch_size * resolve.micro_batches(args) * replicas)

    def get_sp_size(self) -> int:
        """Number of processes that share a sequence (sequence parallelism)."""
        return Trainer._parallel_size(self, "sp_size")

    def get_cp_size(self) -> int:
        """Number of processes that share a sequence (context parallelism)."""
        return Trainer._parallel_size(self, "cp_size")

    def get_tp_size(self) -> int:
        """Number of processes that share a layer (tensor parallelism)."""
        size = getattr(self.model, "tp_size", None)
        return size if size is not None else Trainer._parallel_size(self, "tp_size")

    def _parallel_size(self, name: str) -> int:
        return int(getattr(getattr(self.accelerator, "parallelism_config", None), name, 1))

    def quarantine(self, sample_ids: Iterable[int | str], column: str | None = None) -> None:
        """Excludes samples from training, from the next step on and in later runs of `output_dir`.

        They are written to `quarantine.jsonl`. The current epoch and later ones become shorter, and so does the run if
        it counts epochs. If a sampler of yours draws the order, or batches are formed by length, batches get smaller
        instead. Every process must call it, for example from a callback. A stream drops the rows when it reads them;
        its worker processes begin to do so in the next epoch.

        Args:
            sample_ids: indices in `train_dataset`; positions from 0 in a stream of fixed order; or values of `column`.
            column: a column of the stream, with values that identify the rows.

        Raises:
            DataError: an id matches no sample of this dataset, or no sample would remain.
        """
        find_method("quarantine")(self, self._trainwright.run, sample_ids, column)

    # -- starting and resuming -----------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint.

        Args:
            resume_from_checkpoint: its directory.
            model: the model to load them into; default `self.model`.
        """
        model = self.model if model is None else model
        checkpoint = self._trainwright.run.opened(resume_from_checkpoint)
        self._issue_warnings_after_load(Trainer._checkpointer(self).read_weights(model, checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Logs which weights were missing from a checkpoint, or unexpected in it.

        Args:
            load_result: the result of `load_state_dict`, with the lists `missing_keys` and `unexpected_keys`.
        """
        checkpointing.log_load_result(load_result)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Fills `state`, from the checkpoint if there is one.

        Args:
            max_steps: optimizer steps of the whole run.
            num_update_steps_per_epoch: optimizer steps of an epoch.
            num_train_epochs: epochs of the whole run.
            resume_from_checkpoint: folder of the checkpoint; None for a new run.
            trial: trial of a search, or None.

        Returns:
            The first epoch, from 0, and how many of its micro-batches are done already.

        Raises:
            CheckpointError: the record of the checkpoint cannot be used by this run.
        """
        is_own = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        folder = self._get_output_dir(trial)
        checkpoint = None if resume_from_checkpoint is None else self._trainwright.run.opened(resume_from_checkpoint)
        state = self._trainwright.run.load_record(
            checkpoint,
            self.args,
            self._trainwright.services.engine,
            stateful=Trainer._stateful(self),
            folder=folder,
            is_own=is_own,
        )
        state.train_batch_size = self._train_batch_size
        if checkpoint is None or get_behaviour(self.args).resume_recomputes_intervals:
            state.compute_steps(self.args, max_steps)
        state.is_hyper_param_search = trial is not None
        state.init_training_references(self, max_steps, num_train_epochs, trial)
        state.trial_name, state.trial_params = Trainer._name_and_params(self, trial)
        if checkpoint is None:
            return 0, 0
        self._load_callback_state()
        steps = num_update_steps_per_epoch
        return self._trainwright.run.find_position(
            checkpoint, self.args, self._trainwright.services.engine, steps_per_epoch=steps
        )

    def _load_callback_state(self) -> None:
        """Restores the state of callbacks from the checkpoint.

        `control` gets its flags if their settings are restored.
        """
        with_settings = self.args.restore_callback_states_from_checkpoint
        if not with_settings and not get_behaviour(self.args).resume_restores_callbacks:
            return
        callbacks = [*self.callback_handler.callbacks, *([self.control] if with_settings else [])]
        resume.restore_callbacks(self.state.stateful_callbacks, callbacks, with_settings=with_settings)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """Makes the optimizer and the schedule, and loads their states.

        Args:
            max_steps: optimizer steps of the run.
            train_dataloader: the loader of the training data.
            resume_from_checkpoint: directory to load the states from; None for a fresh run.

        Returns:
            The model as the engine wrapped it, in training mode, and the loader.
        """
        if self._created_lr_scheduler:  # its length was that of an earlier train()
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        import_compiler()  # an override may make the optimizer
        engine = self._trainwright.services.engine
        run = self._trainwright.run
        handler = self.callback_handler
        engine.expect(num_steps=max_steps, num_warmup_steps=self.args.get_warmup_steps(max_steps))
        prepared = engine.setup(
            self._wrap_model(self.model),
            make_optimizer=lambda model: Trainer._make_optimizer(self, model, max_steps),
            make_scheduler=lambda optimizer: Trainer._make_scheduler(self, optimizer, max_steps),
        )
        self.model_wrapped = prepared.model
        self.optimizer = prepared.optimizer
        self.lr_scheduler = prepared.scheduler
        self._trainwright.services.read_flags()
        wanted = schedules.collect_settings(self.optimizer, self.lr_scheduler)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        if run.resumed.args is not None and get_behaviour(self.args).resume_applies_new_settings:
            run.resumed.changes = resume.apply_new_settings(
                self.optimizer,
                self.lr_scheduler,
                wanted,
                run.resumed.args,
                args=self.args,
                num_steps=max_steps,
                is_own=not self._created_lr_scheduler,
            )
        handler.model = self.model
        handler.optimizer = self.optimizer
        handler.lr_scheduler = self.lr_scheduler
        handler.train_dataloader = getattr(train_dataloader, "dataloader", train_dataloader)
        handler.rebuild()
        model_modes.train_mode(self.model_wrapped, self.optimizer)
        return self.model_wrapped, train_dataloader

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Returns the model as it is run; on one device, the model itself.

        Args:
            model: the user's module.
            training: whether it is for training or for evaluation.
            dataloader: unused; accepted for compatibility.

        Returns:
            The module that `forward` is called on.
        """
        return model if training else self._trainwright.services.engine.setup_for_evaluation(model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the states of the optimizer and the schedule.

        Args:
            checkpoint: folder of the checkpoint; None loads nothing.

        Raises:
            CheckpointError: they do not fit the optimizer or the schedule of this run.
        """
        if checkpoint is not None:
            opened = self._trainwright.run.opened(checkpoint)
            Trainer._checkpointer(self).read_states(self.model_wrapped, self.optimizer, self.lr_scheduler, opened)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Loads the state of the loss scale (fp16).

        Args:
            checkpoint: folder of the checkpoint; None loads nothing.
        """
        if checkpoint is not None:
            training_state.load_scaler(self.accelerator, self._trainwright.run.opened(checkpoint).path)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restores the random states of this process from the checkpoint.

        Args:
            checkpoint: folder of the checkpoint; None changes nothing.
        """
        if checkpoint is not None:
            self._trainwright.services.writer.wait()  # a pending save may be replacing this checkpoint
            resume.load_rng(
                self._trainwright.run.opened(checkpoint),
                rank=self._trainwright.services.engine.replica,
                num_processes=self._trainwright.services.engine.num_replicas,
                step=self.state.global_step,
            )

    # -- optimizer and schedule ----------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Makes both. Override this method, or either of the next two.

        Args:
            num_training_steps: optimizer steps of the run.
        """
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: Any = None) -> Any:
        """Makes the optimizer, unless there is one already.

        Args:
            model: has the parameters; default `self.model`.

        Returns:
            `self.optimizer`.
        """
        model = self.model if model is None else model
        if self.optimizer is None:
            from trainwright.optim.factory import build_optimizer

            cls, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            decays = self.get_decay_parameter_names(model)
            self.optimizer = build_optimizer(cls, kwargs, model, args=self.args, decay_names=decays)
            self._trainwright.services.adoption.note_made(self, optimizer=None, scheduler=self.lr_scheduler)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Makes the learning-rate schedule, unless there is one already.

        Args:
            num_training_steps: optimizer steps of the run.
            optimizer: the optimizer to schedule; default `self.optimizer`.

        Returns:
            `self.lr_scheduler`.
        """
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = schedules.schedule_for(self.args, optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Looks up the optimizer that `args.optim` names.

        Args:
            args: the settings.
            model: for optimizers that need the names of its layers.

        Returns:
            Its class, and its keyword arguments without parameters and weight decay.
        """
        from trainwright.optim import factory

        return factory.optimizer_class_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the parameters that get weight decay: all except biases and parameters of normalization layers.

        Args:
            model: has the parameters.

        Returns:
            Names as in `model.named_parameters()`.
        """
        return current("get_parameter_names", get_parameter_names)(model, NO_DECAY_LAYERS, NO_DECAY_PATTERNS)

    def _make_optimizer(self, model: nn.Module, num_training_steps: int) -> Any:
        if is_overridden(self, "create_optimizer_and_scheduler"):
            self.create_optimizer_and_scheduler(num_training_steps=num_training_steps)
            return self.optimizer
        return self.create_optimizer()

    def _make_scheduler(self, optimizer: Any, num_training_steps: int) -> Any:
        if is_overridden(self, "create_optimizer_and_scheduler") and self.lr_scheduler is not None:
            return self.lr_scheduler  # it made both
        return self.create_scheduler(num_training_steps=num_training_steps, optimizer=optimizer)

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Prepares for another size of micro-batches (`auto_find_batch_size`): called with the first and each smaller.

        Args:
            batch_size: samples per device and micro-batch.
        """
        self._trainwright.services.engine.empty_cache()

    # -- the micro-batches of a step -----------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Batch], Items]:
        """Returns the window: the micro-batches of one optimizer step.

        Args:
            epoch_iterator: yields the collated batches of the epoch.
            num_batches: how many to take; fewer at the end of the data.
            device: device for the number of items; default the run's device.

        Returns:
            The batches, and the label items of all of them over all processes: a scalar on `device`, fp32, or None if
            neither the model nor the loss function asks for it.
        """
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return batches, self._get_num_items_in_batch(
            batches, self._trainwright.services.engine.device if device is None else device
        )

    def prepare_window(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches of an optimizer step. An override may replace the batches that were read.

        It is called once per step, before `on_step_begin`; all processes must return the same number of batches.
        `num_items_in_batch` is counted over the returned batches, and the data position over the batches that were
        read. Put any state of your own into `checkpoint_items`: a checkpoint then saves it as of the end of a step.

        Args:
            batches: the collated batches; fewer at the end of an epoch.

        Returns:
            At least one micro-batch, as a collator makes it.

        Example:
            >>> def prepare_window(self, batches):  # trains on the model's own generations, renewed every four steps
            ...     if self.state.global_step % 4 == 0:
            ...         self.buffer.fill(self.model, batches)
            ...     return self.buffer.next_batches(len(batches))
        """
        return batches

    def step_contexts(self) -> Iterable[AbstractContextManager[Any]]:
        """Returns new context managers to enter around the forward and backward passes of a micro-batch.

        For an override.

        They are entered from left to right, inside the engine's own context (`no_sync`). If the pass raises an error,
        they are left with GeneratorExit: clean up in `finally`.

        Returns:
            Context managers that have not been entered yet.

        Example:
            >>> def step_contexts(self):
            ...     return [torch.autograd.graph.save_on_cpu()]
        """
        return ()

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Items:
        """Counts the label items of all micro-batches of a window, if the model or the loss function asks for them.

        Args:
            batch_samples: the micro-batches of a window.
            device: device for the number.

        Returns:
            An fp32 scalar on `device`, of all processes with `average_tokens_across_devices`; None if nothing asks.
        """
        rule = self._trainwright.run.losses.rule or Trainer._loss_rule(self)
        count = rule.count(batch_samples)
        if count is None:
            return None
        if rule.num_processes == 1:
            return count.to(device, torch.float32)  # so that dividing a half-precision sum does not round
        return Trainer._sum_items(self, count, device)

    def _sum_items(self, count: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Sums label items over processes; where only the loss reads the sum, it may arrive during the forward pass."""
        run = self._trainwright.run
        engine = self._trainwright.services.engine
        clock = run.progress.clock
        started = engine.start_sum(count) if run.counts_may_be_late and not run.is_evaluating else None

        def receive() -> torch.Tensor:
            before = clock.mark(WAITING)
            total = engine.sum(count) if started is None else started()
            clock.mark(before)
            return total.to(device, torch.float32)

        return receive() if started is None else PendingScalar.sent(receive, device=device)

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Items = None) -> torch.Tensor:
        """Runs the forward and backward passes for one micro-batch.

        Args:
            model: as the engine wrapped it.
            inputs: the collated batch, tensors of shape (batch, ...) on any device.
            num_items_in_batch: label items of the whole window (int or scalar tensor); None if they are not counted.

        Returns:
            The loss as added to the window's sum: a scalar on the model's device, detached.
        """
        if getattr(self._prepare_context_parallel_inputs, "__func__", None) is not PREPARE_CONTEXT_PARALLEL:
            return Trainer._train_in_own_context(self, model, inputs, num_items_in_batch)
        batch = Trainer._begin_forward(self, model, inputs, num_items_in_batch)
        loss = Trainer._loss_in_contexts(self, model, batch, num_items_in_batch)
        del batch
        question = self._trainwright.run.losses.question
        if question is not None:
            question.compare(loss, num_items_in_batch)
        return Trainer._differentiate(self, loss, inputs, num_items_in_batch)

    def _train_in_own_context(self, model: Any, inputs: Batch, num_items: Items) -> torch.Tensor:
        """Runs `training_step` in the context of an override of `_prepare_context_parallel_inputs`."""
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with context():
            batch = Trainer._begin_forward(self, model, inputs, num_items)
            loss = Trainer._loss_in_contexts(self, model, batch, num_items)
            question = self._trainwright.run.losses.question
            if question is not None:
                question.compare(loss, num_items)
            return Trainer._differentiate(self, loss, inputs, num_items)

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: Batch
    ) -> tuple[Callable[[], AbstractContextManager[Any]], Batch]:
        """Returns the context of a micro-batch's passes and its inputs; the engine itself cuts shared sequences.

        Args:
            model: as the engine wrapped it.
            inputs: the collated batch; in an evaluation, on the device.

        Returns:
            A function that makes the context, and the inputs.
        """
        return nullcontext, inputs

    def _begin_forward(
        self, model: Any, inputs: Batch, num_items: Items = None, *, compares_loss: bool = True
    ) -> Batch:
        """Sets the model to training mode and moves a micro-batch to the device.

        Finds out whether the user's own loss is a mean, if that matters now: `compares_loss` if the caller compares the
        loss of the micro-batch.
        """
        run = self._trainwright.run
        if run.eval_mode_guard is not None or not (model.training and self.model.training):
            run.end_evaluation(model, self.optimizer)
        progress = run.progress
        clock = run.progress.clock
        clock.mark(HOST_TO_DEVICE)
        progress.recorded.batch = inputs
        batch = self._prepare_inputs(inputs)
        clock.mark(FORWARD)
        if run.losses.question is not None:
            run.losses.question.ask(
                functools.partial(Trainer._loss_in_contexts, self), model, batch, num_items, compares=compares_loss
            )
        return batch

    def _differentiate(
        self, loss: torch.Tensor | LossOutput, inputs: Batch, num_items: Items, *, is_scaled: bool | None = None
    ) -> torch.Tensor:
        """Runs the backward pass for a micro-batch's loss, divided as the run requires.

        Returns its share of the window's sum.

        `inputs` are the collated batch; `is_scaled`: a loss from outside `compute_loss` is scaled already.
        """
        run = self._trainwright.run
        engine = self._trainwright.services.engine
        progress = self._trainwright.run.progress
        progress.recorded.batch = None
        first = None
        if run.extensions.micro_batch:
            first = run.tell_micro_batch(loss, inputs, num_items)
        every = self.args.torch_empty_cache_steps
        if every is not None and progress.state.global_step % every == 0:
            engine.empty_cache()
        micro_batches = self.current_gradient_accumulation_steps
        share = progress.window.part_of_micro_batch
        rule = run.losses.rule or Trainer._loss_rule(self)
        if is_scaled is not None and not isinstance(loss, LossOutput):
            rule = replace(rule, is_scaled=is_scaled)
            loss = rule.undo_averaging(loss, None, num_items) if is_scaled else loss
        try:
            if isinstance(loss, LossOutput):
                loss, added = run.scale_loss(loss, rule, inputs, num_items, engine=engine, micro_batches=micro_batches)
                first = first if first is None else first.to(loss.dtype)
            else:
                loss = added = rule.apply(loss, inputs, num_items, micro_batches=micro_batches, share=share)
            progress.clock.mark(BACKWARD)
            engine.backward(loss, gradient=first)
        except (AttributeError, TypeError, RuntimeError) as error:
            checks.explain_loss(loss, self.model, error)
            raise
        return added.detach()

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Returns a batch as the model takes it, on the device.

        Args:
            inputs: name -> tensor, or nested dicts, lists and tuples of tensors. A subclass that computes its own loss
                may use batches of any type.

        Returns:
            The batch with its tensors on the device of the model; containers keep their type.

        Raises:
            DataError: it is empty, or it is not a dict and the model takes its entries by name.
        """
        if not (type(inputs) is dict or isinstance(inputs, Mapping)):
            by_name = not is_overridden(self, "compute_loss", "training_step", "prediction_step")
            input_pipeline.check_unnamed_batch(inputs, self.model, is_read_by_name=by_name)
            return self._prepare_input(inputs)
        if not inputs:
            input_pipeline.raise_empty_batch(self.model, self._signature_columns)
        if METRICS in inputs:
            progress = self._trainwright.run.progress
            share = progress.window.part_of_micro_batch
            progress.recorded.add_from_collator(inputs[METRICS], step=progress.step_under_way, share=share)
            inputs = {name: value for name, value in inputs.items() if name != METRICS}
        return self._prepare_input(inputs)  # type: ignore[no-any-return]

    def _prepare_input(self, data: Any) -> Any:
        """Moves the tensors of a value to the device.

        Args:
            data: a tensor of any shape, or dicts, lists and tuples of tensors; anything else is returned unchanged.

        Returns:
            The same structure; floating-point tensors have the dtype that the engine needs (DeepSpeed: its weights').
        """
        if type(data) is dict:  # the usual case; `isinstance` with abstract classes is slow
            return {key: self._prepare_input(value) for key, value in data.items()}
        if isinstance(data, torch.Tensor):
            engine = self._trainwright.services.engine
            if engine.input_dtype is not None and data.is_floating_point():
                data = data.to(engine.input_dtype)
            return data if data.device == engine.device else data.to(engine.device, non_blocking=engine.non_blocking)
        if isinstance(data, Mapping):
            kind = dict if isinstance(data, TailBatch) else type(data)
            return kind({key: self._prepare_input(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(value) for value in data)
        return data

    def _loss_in_contexts(self, model: Any, inputs: Batch, num_items: Items, **options: bool) -> Any:
        """Calls `compute_loss` in the contexts that an override adds.

        This class adds none, and even an empty stack is slow.
        """
        contexts = self.compute_loss_context_manager
        autocast = self.autocast_smart_context_manager
        if (getattr(contexts, "__func__", None), getattr(autocast, "__func__", None)) != LOSS_CONTEXTS:
            with contexts():
                return self.compute_loss(model, inputs, num_items_in_batch=num_items, **options)
        if options:  # a call with a dict of options takes three times as long
            return self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items)
        return self.compute_loss(model, inputs, num_items_in_batch=num_items)

    def compute_loss_context_manager(self) -> ExitStack:
        """Returns the contexts in which the loss is computed; an override adds its own."""
        stack = ExitStack()
        autocast = self.autocast_smart_context_manager
        if getattr(autocast, "__func__", None) is not LOSS_CONTEXTS[1]:  # the forward has ours
            stack.enter_context(autocast())
        return stack

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Returns the mixed-precision context, for a forward pass of your own; `model_wrapped` enters it by itself.

        Args:
            cache_enabled: whether to cache casts of weights within the context.

        Returns:
            A `torch.autocast` for the device and dtype of the run; no effect in full precision.
        """
        kind = self._trainwright.services.engine.device.type
        dtype = DTYPES.get(getattr(self.args, "mixed_precision", "no"))
        return torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=cache_enabled)

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Items = None
    ) -> Any:
        """Returns the loss of a micro-batch: the model's own, or by `compute_loss_func` or label smoothing.

        An override that computes its own loss may declare in `loss_is_scaled_for_ga` whether the loss is already
        scaled. Otherwise this is found out at the first micro-batch, if a step has several or several processes train:
        the loss is computed once more, without gradients, with twice the number of items.

        Args:
            model: as the engine wrapped it.
            inputs: the collated batch on `args.device`; `labels` may be removed from it.
            return_outputs: also return the model's output.
            num_items_in_batch: label items in the whole window (int or scalar tensor); None if they are not counted.
                A loss divided by this number is scaled for the window.

        Returns:
            A scalar on the model's device with its graph, or a `LossOutput`; with `return_outputs`, a tuple of it and
            the model's output.

        Raises:
            ModelError: the model returned no loss.
        """
        run = self._trainwright.run
        labels = None
        if self.label_smoother is not None or self.compute_loss_func is not None:
            labels = inputs.pop("labels", None)
        if self._trainwright.accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = run.forward(model, inputs)
        is_training = model.training and self.model.training  # DeepSpeed's engine is always in the training mode
        if run.extensions.needs_outputs and is_training:
            run.outputs = outputs, inputs
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif labels is not None and self.label_smoother is not None:
            shift = model_facts.is_causal_lm(self._trainwright.services.engine.unwrap(model))
            loss = self.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=num_items_in_batch)
        else:
            loss = output_loss(outputs)
        if not isinstance(loss, torch.Tensor):
            said = loss if isinstance(loss, LossOutput) else outputs
            if isinstance(said, LossOutput):
                return (said, outputs if said is loss else said.predictions()) if return_outputs else said
            checks.raise_no_loss(model, inputs, outputs, loss, made_by=self.compute_loss_func)
        rule = run.losses.rule or Trainer._loss_rule(self)
        loss = rule.undo_averaging(loss, outputs, num_items_in_batch)
        if is_training:
            loss = rule.weigh_auxiliary(loss, outputs, sample_share=run.progress.window.share)
        return (loss, outputs) if return_outputs else loss

    def _loss_rule(self) -> LossRule:
        """Returns how losses are scaled, according to the current model and arguments."""
        is_mean = "num_items_in_batch" in missing_names(self.compute_loss)  # an override written for an older version
        return loss_rules.loss_rule(
            self.model,
            self.args,
            accepts_loss_kwargs=self._trainwright.accepts_loss_kwargs and not is_mean,
            has_loss_func=self.compute_loss_func is not None,
            has_own_loss=is_overridden(self, "compute_loss"),
            declares_loss_kwargs=self._trainwright.declares_loss_kwargs,
            smooths_labels=self.label_smoother is not None,
            is_scaled=False if is_mean and self.loss_is_scaled_for_ga is None else self.loss_is_scaled_for_ga,
            num_processes=self._trainwright.services.engine.num_replicas,
        )

    def _uses_outputs(self) -> bool:
        """Returns whether training uses the model's outputs besides its own loss."""
        return Trainer._has_loss_outside_model(self) or is_overridden(self, "training_step")

    def floating_point_ops(self, inputs: Batch) -> float:
        """Estimates the operations of the forward and backward passes of a micro-batch: 6 x parameters x tokens.

        A model with a method of this name counts them itself. Embedding parameters are excluded (Kaplan et al.
        2020, arXiv:2001.08361, section 2.1).

        Args:
            inputs: the micro-batch, on any device.

        Returns:
            Floating-point operations.
        """
        return self._trainwright.run.flops.estimate(self.model, inputs)

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Counts the input tokens of a micro-batch, on the device, if `include_num_input_tokens_seen` is set.

        Args:
            inputs: the micro-batch, on the device; its tokens are in `model.main_input_name`.
        """
        mode = self.args.include_num_input_tokens_seen
        if mode != "no":
            progress = self._trainwright.run.progress
            progress.tokens = progress.tokens + count_tokens(inputs, self.model, self.processing_class, mode=mode)

    # -- the update of the weights -------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: Any) -> Any:
        """Scales the gradients down to `max_grad_norm`.

        Args:
            model: the model as the engine has wrapped it.

        Returns:
            Norm of all gradients before clipping, a scalar tensor on the device (DeepSpeed: a float).
        """
        is_own = getattr(self._has_mixed_mesh_grads, "__func__", None) is not HAS_MIXED_MESH_GRADS
        if is_own and self._has_mixed_mesh_grads(model):
            return self._mixed_mesh_grad_norm(model, self.args.max_grad_norm)
        return self._trainwright.services.engine.clip(model, self.args.max_grad_norm)

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        """Returns False: the engine clips gradients on several device meshes together.

        Where an override returns True, `_mixed_mesh_grad_norm` clips.

        Args:
            model: the model as the engine has wrapped it.
        """
        return False

    def _mixed_mesh_grad_norm(self, model: Any, max_norm: float) -> Any:
        """Scales the gradients down to a norm.

        Args:
            model: the model as the engine has wrapped it.
            max_norm: the norm; infinite to measure alone.

        Returns:
            Norm of all gradients before clipping, a scalar tensor on the device.
        """
        return self._trainwright.services.engine.clip(model, max_norm)

    def _defer_fsdp_gradient_reduction(self) -> Any:
        """Returns a context in which the gradients of a backward pass are not reduced; the engine enters its own."""
        return self._trainwright.services.engine.accumulate(self.model_wrapped, sync=False)

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Does nothing: the engine keeps parameters that it does not shard equal in all processes.

        Args:
            model: the model as the engine has wrapped it.
        """

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Returns the norm of the gradients.

        Args:
            model: the model as the engine has wrapped it.
            grad_norm: the norm measured by clipping; None measures it now.

        Returns:
            A scalar tensor on the device (DeepSpeed: a float).
        """
        if grad_norm is not None:
            return grad_norm
        is_own = getattr(self._has_mixed_mesh_grads, "__func__", None) is not HAS_MIXED_MESH_GRADS
        if is_own and self._has_mixed_mesh_grads(model):
            return self._mixed_mesh_grad_norm(model, math.inf)
        if get_behaviour(self.args).measured_gradients_stay:
            return self._trainwright.services.engine.measure_norm(model)
        return self._trainwright.services.engine.clip(model, math.inf)

    def _get_learning_rate(self) -> float:
        """Returns the learning rate of the first parameter group."""
        return schedules.current_rate(self.lr_scheduler, self.optimizer)

    def get_learning_rates(self) -> list[float]:
        """Returns the learning rate of each parameter group.

        Raises:
            ValueError: there is no optimizer yet.
        """
        return [group["lr"] for group in checks.need_optimizer(self.optimizer).param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """Returns the parameter group of a parameter.

        Args:
            param: a parameter, or its name in the model; None for the parameters of all groups, as a list of lists.

        Returns:
            The group, a dict; None if no group has the parameter.

        Raises:
            ValueError: there is no optimizer yet.
        """
        param_groups = checks.need_optimizer(self.optimizer).param_groups
        if param is None:
            return [group["params"] for group in param_groups]
        if isinstance(param, str):
            param = dict(self.model.named_parameters()).get(param)
        return next((group for group in param_groups if any(p is param for p in group["params"])), None)

    def get_num_trainable_parameters(self) -> int:
        """Returns the number of elements in all trained parameters, over all processes."""
        return sum(model_facts.num_elements(p) for p in self.model.parameters() if p.requires_grad)

    # -- after a step: log, evaluate, save -----------------------------------------------------------------------------

    @takes_no_grad_norm_too
    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Logs, evaluates and saves after a step, as the flags of `control` ask.

        Args:
            tr_loss: sum of the losses since the last log, a scalar on the device.
            grad_norm: gradient norm of the last step, before clipping; None before the first step.
            model: as the engine wrapped it.
            trial: of a search.
            epoch: the current epoch.
            ignore_keys_for_eval: entries of the model's output that are not predictions.
            start_time: of the run, as `time.time()`; with it tokens per second are logged.
            learning_rate: of the last step; default the schedule's current rate.
        """
        run = self._trainwright.run
        progress = run.progress
        control = run.progress.control
        if not (control.should_log or control.should_evaluate or control.should_save):
            return
        before = progress.clock.mark(LOGGING)
        self.store_flos()
        if control.should_log and self.state.global_step > progress.step_last_logged:
            loss, num_non_finite = run.drain_loss(num_workers=self.args.dataloader_num_workers)
            num_non_finite = num_non_finite if get_behaviour(self.args).reports_nonfinite_losses else 0
            run.check_parameters(self.optimizer, finds_new=False)
            rate = self._get_learning_rate() if learning_rate is None else learning_rate
            self.log(step_logs(loss, grad_norm, rate, num_non_finite) | run.extensions.reporting.logged(), start_time)
        if self.control.should_evaluate:
            progress.clock.mark(EVALUATION)
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            is_best = self._determine_best_metric(metrics=metrics, trial=trial)
            self.control.should_evaluate = False  # also if an override does not call the callbacks
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            progress.clock.mark(SAVING)
            if run.eval_mode_guard is not None:
                run.eval_mode_guard.discard_saved_weights()
            self._save_checkpoint(model, trial)
            self.callback_handler.fire("on_save", progress)
            self._trainwright.services.writer.accept_changes()
        progress.clock.mark(before)

    def store_flos(self) -> None:
        """Adds the operations counted since the last call to `state.total_flos`; all processes must call it."""
        extensions = self._trainwright.run.extensions
        extensions.settle_all()
        mine = extensions.reporting.shares() if self._trainwright.run.progress.has_others else []
        if rows := self._trainwright.run.progress.settle([number for numbers in mine for number in numbers]):
            extensions.reporting.tell_shared(mine, rows)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs values and calls the callbacks; adds the epoch, and the number of tokens if they are counted.

        Args:
            logs: names and numbers; the added entries go into it.
            start_time: of the run, as `time.time()`; with it tokens per second are added.
        """
        progress = self._trainwright.run.progress
        state = self.state
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            progress.settle_tokens()
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
            if start_time is not None:
                tokens = state.num_input_tokens_seen - progress.beginning.tokens
                logs.update(current("speed_metrics", speed_metrics)("train", start_time, num_tokens=tokens))
        state.log_history.append(results.make_record({**logs, "step": state.global_step}, progress.warned.metrics))
        limit = get_value(self.args, "log_history_limit")
        # Other code calls `log` with arguments of its own making, where any name has a value.
        if isinstance(limit, int):
            del state.log_history[:-limit]
        self.callback_handler.fire("on_log", progress, logs=logs)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Runs an evaluation during training, and steps schedules that follow a metric.

        Args:
            trial: trial of a search, which is given the metrics.
            ignore_keys_for_eval: entries of the model's output that are not predictions.
            skip_scheduler: do not step the schedule.

        Returns:
            Name -> metric, with the prefixes of the datasets.

        Raises:
            EvaluationMemoryError: the device's memory is full.
        """
        run = self._trainwright.run
        evaluate = functools.partial(self.evaluate, None, ignore_keys_for_eval)
        try:
            with run.progress.evaluating_all_parts():
                metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
                if run.extensions.reporting.evaluated:
                    metrics = {**metrics, **run.extensions.reporting.evaluate_further(run, evaluate)}
        except RuntimeError as error:
            if not self._trainwright.services.engine.is_out_of_memory(error):
                raise
            raise EvaluationMemoryError(
                f"Out of memory in an evaluation, at step {self.state.global_step}: {error} Lower "
                f"per_device_eval_batch_size ({self.args.per_device_eval_batch_size}), or set eval_accumulation_steps "
                "to move results off the device; auto_find_batch_size only changes training."
            ) from error
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if schedules.follows_metrics(self.lr_scheduler) and not skip_scheduler:
            self.lr_scheduler.step(checks.need_best_metric(self.args.metric_for_best_model, metrics))
        return metrics

    def record(
        self, name: str, value: torch.Tensor | float, weight: torch.Tensor | float = 1.0, reduce: str = "mean"
    ) -> None:
        """Records a number for the next log, or for the metrics of the current evaluation.

        It may be called wherever the trainer is available: in `compute_loss` and other hooks, callbacks,
        `compute_metrics`. A tensor is copied on its device without synchronizing; all values are read back, summed in
        double precision and reduced over processes together with the loss, so a log needs no extra communication. A
        collator, which may run in another process, adds the entry `"_metrics"` to its batch: `{name: value}`, or
        `{name: {"value": ..., "weight": ..., "reduce": ...}}`; it is recorded and removed before `forward`.

        If a guard refuses the update of a step, the numbers recorded in it until then are dropped. Numbers recorded
        since the last log are saved in checkpoints. Outside of training and evaluation, nothing is recorded.

        Args:
            name: name of the logged value; an evaluation adds its prefix (`eval_...`).
            value: a scalar, detached or not; NaN is included.
            weight: weight of the value in the mean over micro-batches and processes: the number of items behind it.
            reduce: how to combine values since the last log, over micro-batches and processes: "mean" (weighted),
                "sum", "max", or "last" (the newest value of the first process that has any).

        Raises:
            ArgumentError: the value is not a scalar, the trainer itself logs this name, or it was recorded with
                another reduction.

        Example:
            >>> self.record("entropy", entropy.mean(), weight=entropy.numel())
        """
        run = self._trainwright.run
        if run.is_training or run.is_evaluating:
            run.progress.recorded.add(name, value, weight, reduce, step=run.progress.step_under_way)

    # -- evaluation and prediction -------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates the model; several sets (a dict) one after another.

        Args:
            eval_dataset (Dataset | dict[str, Dataset]): data to use in place of the trainer's.
            ignore_keys: entries of the model's output that are not predictions.
            metric_key_prefix: first part of the metrics' names; a set's name follows it.

        Returns:
            `<prefix>_loss`, the metrics, run time in seconds and rates per second.

        Raises:
            NestedCallError: this trainer is already evaluating, for example if `compute_metrics` calls it.
        """
        self._trainwright.run.check_not_evaluating()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            results: dict[str, float] = {}
            for name, part in dataset.items():
                chosen = name if eval_dataset is None else part
                results |= self.evaluate(chosen, ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return results
        progress = self._trainwright.run.progress
        number = progress.evaluation.begin_part()
        with self._memory_tracker.measuring("eval"):
            dataloader = self.get_eval_dataloader(eval_dataset)
            loss_only = True if self.compute_metrics is None else None
            metrics: Any = Trainer._timed_loop(
                self, dataloader, "Evaluation", loss_only, ignore_keys, metric_key_prefix
            ).metrics
            with progress.evaluation.logging(number) as is_new:
                if is_new:
                    self.log(metrics)
            with progress.evaluation.telling(number) as is_new:
                if is_new:
                    self.callback_handler.fire("on_evaluate", progress, metrics=metrics)
        self._memory_tracker.stop_and_update_metrics(metrics, stage="eval")
        return metrics  # type: ignore[no-any-return]

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Returns predictions for a dataset, and metrics if it has labels.

        Args:
            test_dataset: samples, with or without labels.
            ignore_keys: entries of the model's output that are not predictions.
            metric_key_prefix: first part of the metrics' names.

        Returns:
            Predictions and labels as numpy arrays (nested like the model's output), one row per sample, in order.
        """
        with self._memory_tracker.measuring("test"):
            dataloader = self.get_test_dataloader(test_dataset)
            output = Trainer._timed_loop(self, dataloader, "Prediction", None, ignore_keys, metric_key_prefix)
            self.callback_handler.fire("on_predict", self._trainwright.run.progress, metrics=output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics, stage="test")
        return current("PredictionOutput", PredictionOutput)(output.predictions, output.label_ids, output.metrics)

    def _timed_loop(
        self, dataloader: Any, description: str, loss_only: bool | None, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        accept_older_signatures(self)
        train.follow_model(self)
        checks.warn_long_socket_paths(dataloader)
        start_time = time.time()
        args = self.args
        run = self._trainwright.run
        engine = self._trainwright.services.engine
        behaviour = get_behaviour(args)
        dtype = None
        if not self.is_in_train and args.fp16_full_eval:
            dtype = DTYPES["fp16"]
        elif not self.is_in_train and args.bf16_full_eval:
            dtype = DTYPES["bf16"]
        with (
            engine.together(run.progress.interrupts),
            run.unchanged_random_states() if behaviour.evaluation_restores_random_states else NO_CONTEXT,
            eval_precision(self.model, dtype, restores=behaviour.evaluation_restores_precision),
        ):
            loop = self.prediction_loop if get_value(args, "use_legacy_prediction_loop") else self.evaluation_loop
            try:
                output = loop(
                    dataloader,
                    description=description,
                    prediction_loss_only=loss_only,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=prefix,
                )
            except Exception as error:
                name = getattr(dataloader, "sample_name", bad_sample.number_text)
                bad_sample.name_sample(error, where=f"the data of {prefix!r}", name=name)
                raise
        num_steps = math.ceil((output.num_samples or 0) / (args.eval_batch_size * engine.num_replicas))
        metrics: Any = output.metrics
        measure_speed = current("speed_metrics", speed_metrics)
        metrics.update(measure_speed(prefix, start_time, num_samples=output.num_samples, num_steps=num_steps))
        return output

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Runs the model over a dataloader; used by `evaluate` and `predict`.

        Args:
            dataloader: yields the batches of this process.
            description: "Evaluation" or "Prediction"; in a prediction, labels may be missing and predictions are kept.
            prediction_loss_only: compute no metrics; default `args.prediction_loss_only`.
            ignore_keys: entries of the model's output that are not predictions.
            metric_key_prefix: first part of the metrics' names.

        Returns:
            Predictions and labels of all processes (None unless they are kept), metrics, and the number of samples.
        """
        from trainwright.evaluation import eval_loop

        run = self._trainwright.run
        handler = self.callback_handler
        engine = self._trainwright.services.engine
        model = self._wrap_model(self.model, training=False)
        run.begin_evaluation(model, self.optimizer)
        if not run.is_dry:
            handler.eval_dataloader = dataloader
        mixed = NO_CONTEXT if self.is_in_train else engine.mixed_precision(self.model)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        cut = engine.evaluating(keeps_outputs=not loss_only)
        with run.evaluating(run.losses.rule or Trainer._loss_rule(self), engine.device), mixed, cut:
            context = build.evaluation_context(
                self.args,
                self._trainwright.services,
                events=run.events(handler),
                compute_metrics=self.compute_metrics,
                is_prediction=description == "Prediction",
                model=model,
                rule=run.losses.rule,
                label_names=self.label_names,
                main_input=model_facts.main_input_name(self.model),
                preprocess_logits=self.preprocess_logits_for_metrics,
                loss_only=loss_only,
                ignore_keys=ignore_keys,
                loss_rows=self._trainwright.methods._loss_rows(self, dataloader),
            )
            return eval_loop.evaluation_loop(context, run.progress, self, dataloader, prefix=metric_key_prefix)

    def _loss_rows(self, dataloader: Any) -> int | None:
        """Number of rows that the loss of an evaluation batch counts for; None for all rows of the batch."""
        if get_behaviour(self.args).weighs_eval_batches_by_rows:
            return None
        from trainwright.evaluation import eval_loop

        is_apart = resolve.reads_streams_apart(self.args)
        return None if eval_loop.has_known_end(dataloader, is_read_apart=is_apart) else self.args.eval_batch_size

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Older name of `evaluation_loop`.

        Args:
            dataloader: batches of the data.
            description: name of the loop in the log, such as "Evaluation".
            prediction_loss_only: keep no predictions; None: as the arguments say.
            ignore_keys: entries of the model's output that are not predictions.
            metric_key_prefix: prefix of the names of metrics.

        Returns:
            Predictions, labels, metrics and the number of samples.
        """
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def prediction_step(
        self, model: Any, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Evaluates one batch, without gradients.

        Args:
            model: in evaluation mode.
            inputs: the collated batch, on any device.
            prediction_loss_only: whether to return the loss alone.
            ignore_keys: entries of the model's output that are not predictions; default the keys named in its config.

        Returns:
            Loss (a scalar), logits and labels, detached and on the device; each is None if missing.
        """
        inputs = self._prepare_inputs(inputs)
        label_names = Trainer._label_names_in(self, inputs)
        with_loss = results.is_for_loss(inputs, label_names, returns_loss=self.can_return_loss)
        num_rows = None if prediction_loss_only else count_samples(inputs)
        labels = results.take_labels(inputs, label_names) if with_loss and not prediction_loss_only else None
        loss = None
        context: AbstractContextManager[Any] = NO_CONTEXT
        if getattr(self._prepare_context_parallel_inputs, "__func__", None) is not PREPARE_CONTEXT_PARALLEL:
            make_context, inputs = self._prepare_context_parallel_inputs(model, inputs)
            context = make_context()
        with torch.no_grad(), context:
            if with_loss and (self.label_names or not label_names or Trainer._has_loss_outside_model(self)):
                num_items = self._get_num_items_in_batch([inputs], self._trainwright.services.engine.device)
                if prediction_loss_only and Trainer._can_skip_logits(self):
                    inputs = {**inputs, "skip_logits": True}
                returned = Trainer._loss_in_contexts(self, model, inputs, num_items, return_outputs=True)
                needs_outputs = self.compute_metrics is not None and not prediction_loss_only
                loss, outputs = results.split_loss(returned, needs_outputs=needs_outputs)
            else:
                with self.compute_loss_context_manager():
                    outputs = model(**inputs)
                if with_loss:  # the model takes any entry, and may have computed a loss
                    loss = results.find_loss(outputs)
        mean = None if loss is None else self._trainwright.run.evaluated_loss(loss)
        if prediction_loss_only:
            return mean, None, None
        logits = results.split_outputs(outputs, ignore_keys, model=self.model, loss=loss, num_rows=num_rows)
        return mean, logits, labels

    def _label_names_in(self, inputs: Batch) -> list[str]:
        """Returns the entries of an evaluation batch that are labels.

        If neither `label_names` nor `forward` names one, labels go by their common name: for a loss that is computed
        outside of the model, and for a model that takes any entry.
        """
        if self.label_names or self.args.label_names is not None:
            return self.label_names
        if Trainer._has_loss_outside_model(self) or model_facts.takes_any_input(self.model):
            return results.find_common_labels(inputs)
        return []

    def _has_loss_outside_model(self) -> bool:
        """Returns whether the loss is computed outside of the model."""
        is_own = is_overridden(self, "compute_loss")
        return is_own or self.label_smoother is not None or self.compute_loss_func is not None

    def _can_skip_logits(self) -> bool:
        """Returns whether the forward pass is Liger's, which can compute the loss without logits."""
        if not self.args.use_liger_kernel or Trainer._uses_outputs(self):
            return False
        return "skip_logits" in model_facts.forward_parameters(self.model)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Returns tensors of all processes, concatenated; for loops that were copied from earlier versions.

        Args:
            tensors: a tensor, or nested containers of them; None stays None.
            name: unused; accepted for compatibility.
        """
        return None if tensors is None else self.gather_function(tensors)

    def _determine_best_metric(self, metrics: Mapping[str, float], trial: Any) -> bool:
        """Returns whether these metrics are the best so far, and if so, remembers them. NaN is never the best.

        Args:
            metrics: of an evaluation.
            trial: of a search.

        Returns:
            True if `metric_for_best_model` is better than before, or is the first value.

        Raises:
            MetricError: `metric_for_best_model` is not among them.
        """
        if self.args.metric_for_best_model is None:
            return False
        state = self.state
        if state.best_metric is None and not get_behaviour(self.args).best_metric_starts_as_none:
            state.best_metric = -math.inf if self.args.greater_is_better else math.inf
        value = checks.need_best_metric(self.args.metric_for_best_model, metrics)
        best = metric_number(state.best_metric)
        is_better = value == value and (best != best or (value > best if self.args.greater_is_better else value < best))
        if is_better:
            state.best_metric = value
            if self.args.save_strategy != "no":
                state.best_global_step = state.global_step
        return bool(is_better)

    # -- saving --------------------------------------------------------------------------------------------------------

    def _checkpointer(self) -> Checkpointer:
        return Checkpointer(self.args, self._trainwright.services.engine, self._trainwright.services.writer)

    def _get_output_dir(self, trial: Any) -> str:
        """Returns the output directory of this run; a trial of a search has its own.

        Args:
            trial: trial of a search, or None.

        Returns:
            Path of the directory.
        """
        if trial is None or not self._trainwright.search.is_under_way:
            return output_path(self.args)
        offer = self._trainwright.search.offer
        folder: str = load_service("search").trial_folder(output_path(self.args), offer, trial, hp_name=self.hp_name)
        return folder

    @takes_metrics_too
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes `checkpoint-<step>` atomically, then deletes old checkpoints beyond `save_total_limit`.

        Args:
            model: as the engine wrapped it.
            trial: of a search.

        Raises:
            CheckpointWriteError: it cannot be written, and `save_failure` is "stop".
        """
        self.store_flos()
        run = self._trainwright.run
        if not run.resumed.has_random_states:
            # A callback saves before the first batch, at which they are restored.
            run.restore_random_states(self)
        checkpointer = Trainer._checkpointer(self)
        store = checkpointer.store(self._get_output_dir(trial), self.model)
        checkpointer.save(self, run, store, asynchronous=checkpointer.may_be_asynchronous(self, run))
        run.progress.saved_step = checkpointer.writer.newest
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(store.path(self.state.global_step)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model in the format of `from_pretrained`, with the processing class and the arguments.

        If several processes hold parts of the model, all of them must call it. With `push_to_hub`, a call by the user
        also uploads to the Hub.

        Args:
            output_dir: default `args.output_dir`.
            _internal_call: the trainer itself is saving, so nothing is uploaded.
        """
        is_checkpoint = _internal_call and output_dir is not None
        folder = output_path(self.args) if output_dir is None else output_dir
        whole = Trainer._checkpointer(self).weights_to_save(self.model, is_checkpoint=is_checkpoint)
        self._save(folder) if whole is None else self._save(folder, state_dict=whole)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the model, the processing class and the arguments, in the process that saves.

        Args:
            output_dir: default `args.output_dir`.
            state_dict: the weights; default the model's own.
        """
        if self.args.should_save:
            folder = Path(output_path(self.args) if output_dir is None else output_dir)
            processing_class: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            Trainer._checkpointer(self).write_model(self.model, processing_class, folder, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes the states of the optimizer and the schedule; all processes must call it.

        Args:
            output_dir: directory of the checkpoint.
        """
        checkpointer = Trainer._checkpointer(self)
        folder = Path(output_dir)
        checkpointer.form.write_optimizer(checkpointer, self.optimizer, folder)
        if self.args.should_save:
            training_state.save_scheduler(self.lr_scheduler, folder)

    def _save_scaler(self, output_dir: str) -> None:
        """Writes the state of the loss scale (fp16).

        Args:
            output_dir: directory of the checkpoint.
        """
        if self.args.should_save:
            training_state.save_scaler(self.accelerator, Path(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        """Writes the random states of all processes and the data position; all processes must call it.

        Args:
            output_dir: directory of the checkpoint.
        """
        Trainer._checkpointer(self).write_random_states(self._trainwright.run, Path(output_dir))

    def save_state(self) -> None:
        """Writes `trainer_state.json` to the output directory."""
        if self.is_world_process_zero():
            self.state.save_to_json(Path(output_path(self.args)) / TRAINER_STATE_NAME)

    # -- the end of a run ----------------------------------------------------------------------------------------------

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Collects the metrics, loads the best model if requested, and ends the callbacks.

        Args:
            trial: of a search.
            num_train_samples: samples of the whole run.
            start_time: of the run, as `time.time()`.

        Returns:
            Steps trained, mean loss of training, and its metrics by name.
        """
        run = self._trainwright.run
        services = self._trainwright.services
        progress = self._trainwright.run.progress
        for trained in run.extensions.trained:
            trained(run)
        run.extensions.settle_all()
        train_loss, num_steps, num_samples = run.totals(num_train_samples)
        counts_tokens = self.args.include_num_input_tokens_seen != "no"
        tokens = progress.state.num_input_tokens_seen - progress.beginning.tokens if counts_tokens else None
        measure_speed = current("speed_metrics", speed_metrics)
        metrics = measure_speed("train", start_time, num_samples=num_samples, num_steps=num_steps, num_tokens=tokens)
        self.store_flos()
        state = progress.state
        metrics |= {"total_flos": state.total_flos, "train_loss": train_loss}
        peak = self._trainwright.services.engine.peak_flops()
        metrics |= utilisation(state.total_flos - progress.beginning.flos, start_time, peak=peak)
        self._memory_tracker.stop_and_update_metrics(metrics, stage="train")
        self.log(metrics)
        services.writer.wait()
        self._trainwright.services.engine.barrier()  # on no process may train() return before everything is on disk
        if self.args.load_best_model_at_end and state.best_model_checkpoint is None and state.best_global_step:
            folder = self._get_output_dir(trial)
            state.best_model_checkpoint = self._trainwright.services.engine.agree(
                lambda: checkpointing.find_best(state, folder)
            )
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        for finish in run.extensions.finish:
            finish(run)
        if self.args.should_save and not progress.is_interrupted:
            checkpointing.keep_only_best(CheckpointStore(self._get_output_dir(trial)), self.args, run)
        self.callback_handler.fire("on_train_end", progress)
        self._finish_current_push()
        console.show_lines(self.args, console.time_breakdown(self.args, services.journal.end()))
        return current("TrainOutput", TrainOutput)(progress.state.global_step, train_loss, metrics)

    def capture_incident(self, reason: str = "requested") -> Path:
        """Writes an incident bundle of the current step, or of the last step with the current weights.

        For a callback or a hook that finds a step suspicious; `trainwright replay` runs the step again. The forward and
        backward passes of the step are run once more.

        Args:
            reason: for `incident.json`.

        Returns:
            The directory of the bundle, below `output_dir/incidents`.

        Raises:
            BundleError: there is no step, or the bundle cannot be written.
        """
        capture: Callable[..., Path] = find_method("capture_incident")
        folder = self._get_output_dir(self._trial)
        return capture(self, self._trainwright.run, self._trainwright.services.engine, reason, folder=folder)

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint, or of the next best if its files were altered."""
        self._trainwright.services.engine.barrier()  # another process may still be writing it
        folder = self._trainwright.services.engine.agree(
            lambda: checkpointing.best_to_load(self.state, self.args, self._trainwright.run.run_id)
        )
        if folder is not None:
            self._issue_warnings_after_load(Trainer._checkpointer(self).read_weights(self.model, Checkpoint(folder)))
            name = self.args.metric_for_best_model
            best = self.state.best_metric
            console.show_lines(self.args, [f"best      the weights of {folder} are loaded ({name} {best:.4g})"])

    def _finish_current_push(self) -> None:
        """Waits for the current upload, then repeats uploads that failed or were postponed."""
        progress = self._trainwright.run.progress
        self._trainwright.services.uploads.finish(unless=lambda: progress.is_interrupted)

    def end(self) -> None:
        """Ends trackers and process groups; afterwards, nothing that needs other processes works."""
        self.accelerator.end_training()

    # -- reports -------------------------------------------------------------------------------------------------------

    @staticmethod
    def metrics_format(metrics: dict[str, float]) -> dict[str, Any]:
        """Returns metrics in readable form: memory in MB, times as h:mm:ss, floats with four decimals.

        Args:
            metrics: name -> number; bytes for memory, seconds for times.

        Returns:
            Name -> text or number.
        """
        return results.metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Prints metrics, aligned.

        Args:
            split: "train", "eval", "test" or another title.
            metrics: names and numbers.
        """
        if self.is_world_process_zero():
            results.print_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Writes `<split>_results.json` to the output directory.

        Args:
            split: "train", "eval", "test" or another name.
            metrics: names and numbers.
            combined: also add them to `all_results.json`.
        """
        if self.is_world_process_zero():
            results.save_metrics(output_path(self.args), split, metrics, combined=combined)

    # -- the Hub -------------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repository `hub_model_id` if it does not exist; by default named after the output directory.

        Args:
            token: a token with write access; default `args.hub_token`, else the token of the login.
            private: whether a new repository is private; default `args.hub_private_repo`.
        """
        if self.is_world_process_zero():
            uploader = load_service("uploads").Uploader.for_arguments(
                self.args, self._trainwright.services.journal, token=token, private=private
            )
            self.hub_model_id = uploader.open()
            self._trainwright.services.uploads = uploader

    def _open_repository(self, **options: Any) -> None:
        """Opens the repository if it is not open: a copied trainer has its own services, which open it again."""
        if isinstance(self._trainwright.services.uploads, NoUploads):
            self.init_hf_repo(**options)

    def init_git_repo(self, at_init: bool = False) -> None:
        """Older name of `init_hf_repo`.

        Args:
            at_init: unused; accepted for compatibility.
        """
        warn_older_name("init_git_repo", "init_hf_repo")
        self.init_hf_repo()

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | Sequence[str] | None = None,
        dataset_tags: str | Sequence[str] | None = None,
        dataset: str | Sequence[str] | None = None,
        dataset_args: str | Sequence[str] | None = None,
    ) -> None:
        """Writes a model card, README.md, into the output directory; a card edited by hand is left alone.

        Args:
            language: language or languages of the model.
            license: identifier of its license.
            tags: tags of the model.
            model_name: default the name of the output directory.
            finetuned_from: name of the base model.
            tasks: tasks of the model, as the Hub names them.
            dataset_tags: Hub names of the datasets it was trained on.
            dataset: readable names of the datasets.
            dataset_args: their configurations.
        """
        if not self.is_world_process_zero():
            return
        model_card = load_service("model_card")
        given = {
            "language": language,
            "license": license,
            "tags": tags,
            "model_name": model_name,
            "tasks": tasks,
            "base_model": finetuned_from,
            "dataset": dataset,
            "dataset_tags": dataset_tags,
            "dataset_args": dataset_args,
        }
        known = model_card.collect(self.args, self.model, self.train_dataset, self.state.log_history, given)
        model_card.write_card(output_path(self.args), known)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves the model to the output directory, writes its card, and uploads the directory.

        Args:
            commit_message: of the commit.
            blocking: wait until the upload is done; else return at once.
            token: token to use instead of `args.hub_token`.
            revision: branch to use instead of `args.hub_revision`.
            private: whether a new repository is private.
            kwargs: for `create_model_card`.

        Returns:
            The Hub's description of the commit, with its URL; a future of it with `blocking=False`.

        Raises:
            HfHubHTTPError, OSError: the upload failed; during training this is only a warning, and it is tried
                again at the end.
        """
        self.callback_handler.fire("on_push_begin", self._trainwright.run.progress)
        Trainer._open_repository(self, token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        uploads: Any = self._trainwright.services.uploads
        name = kwargs.pop("model_name", None) or uploads.model_name
        self.create_model_card(model_name=name, **kwargs)
        self._finish_current_push()
        in_train = self.is_in_train
        step = self.state.global_step
        job = uploads.push_root(commit_message, token=token, revision=revision, is_training=in_train, step=step)
        if not blocking:
            return job
        return None if in_train and job.exception() is not None else job.result()  # it was logged already

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads a checkpoint as `hub_strategy` says, asynchronously, one at a time.

        Args:
            checkpoint_folder: its path; the checkpoint may still be being written.
        """
        if self.is_world_process_zero():
            progress = self._trainwright.run.progress
            handler = self.callback_handler
            self._trainwright.services.uploads.push_checkpoint(
                Path(checkpoint_folder),
                self.args,
                progress.state,
                when_there=self._trainwright.services.writer.then,
                announce=lambda: handler.fire("on_push_begin", progress),
            )

    # -- a search over hyperparameters ---------------------------------------------------------------------------------

    def hyperparameter_search(
        self,
        hp_space: Callable[..., Any] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[..., str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Searches for the best arguments; `model_init` makes a new model for each trial.

        Args:
            hp_space: maps a trial to its arguments (Optuna), or None to the domains of the arguments (Ray, W&B).
            compute_objective: maps the metrics of an evaluation to the number to optimize, or to a list of several;
                default the sum of the metrics, or the loss if there are none.
            n_trials: how many.
            direction: "minimize" or "maximize"; a list for several objectives.
            backend: "optuna", "ray" or "wandb"; default the first that is installed.
            hp_name: maps a trial to its name, which its directory gets too.
            kwargs: `failed_trials`, `pruned_checkpoints`, `load_best_trial`, `resume_search` (see
                `search.base.SearchSettings`); all others go to the backend's library.

        Returns:
            The best trial; with several objectives, the Pareto-optimal trials.

        Raises:
            SearchSpaceError, MissingModelError, DataError: the search is invalid; no trial was started.
            SearchError: no trial finished.
        """
        best: BestRun | list[BestRun] = load_service("search").search(
            self,
            space=hp_space,
            compute_objective=compute_objective,
            num_trials=n_trials,
            direction=direction,
            backend=backend,
            hp_name=hp_name,
            options=kwargs,
        )
        return best

    def _hp_search_setup(self, trial: Any) -> None:
        """Applies the settings of a trial to the arguments; no effect outside of a search.

        Args:
            trial: trial of the search's backend (of Optuna, a dict of Ray or W&B), or None.
        """
        if trial is not None and self._trainwright.search.is_under_way:
            search = load_service("search")
            search.use_arguments(self, search.make_trial_arguments(self._trainwright.search))

    def _name_and_params(self, trial: Any) -> tuple[str | None, dict[str, Any] | None]:
        """Returns the name and the parameters of a trial, for the record of the run."""
        if trial is None:
            return None, None
        found: tuple[str | None, dict[str, Any]] = load_service("search").name_and_params(
            trial, self._trainwright.search
        )
        return found

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Reports the metrics of a trial to the search, which may end it early; no effect outside of a search.

        Args:
            trial: of the search; None outside of one.
            step: optimizer step of the evaluation.
            metrics: metrics of the evaluation.
        """
        if trial is not None and self._trainwright.search.is_under_way:
            load_service("search").report(self, trial, metrics)

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes a whole checkpoint into a directory of the backend, so that a trial can continue from it.

        Args:
            checkpoint_dir: the directory.
        """
        self.store_flos()
        Trainer._checkpointer(self).save(
            self, self._trainwright.run, CheckpointStore(checkpoint_dir), asynchronous=False
        )

    # -- checks before training ----------------------------------------------------------------------------------------

    def check(
        self,
        *,
        memory: bool = False,
        budget: int | float | str | None = None,
        processes: int | None = None,
        per_node: int | None = None,
        engine: str | Mapping[str, Any] | None = None,
        against: str | Sequence[str] | None = None,
    ) -> CheckReport:
        """Looks for likely problems, on the first batches and without training; the trainer is not changed.

        Args:
            memory: also plan the memory of a step: its uses, and how other settings would change it.
            budget: the available memory, such as "24GB" or a number of bytes; the plan ends with the cheapest change
                that fits. None for the memory of the device.
            processes: also plan a run of this size, without starting it: the memory of each kind of process,
                batches, steps and tokens, bytes sent in a step, and checkpoints. None: no such plan.
            per_node: processes on one machine; default 8, or all if there are fewer.
            engine: how the model is distributed: "ddp", "fsdp2", "shard_grad_op", "hsdp", "zero1", "zero2" or "zero3",
                with "+cp8" or "+sp8" where eight processes share each sequence; or a configuration of DeepSpeed (a
                dict, or a JSON file); by default as in the arguments.
            against: other versions of packages, such as "transformers==5.24.0": trains 20 steps and predicts with the
                installed packages and with these, in processes of their own, and names the first value that differs.

        Returns:
            The findings, each with its evidence and its cure. `print` shows them; `is_fine` is True if none is serious.

        Raises:
            ArgumentError: the plan of a run is asked for in one of several processes, or its numbers do not fit; or
                the packages of `against` cannot be installed, or are the installed ones.
            ProcessFailedError: the 20 steps fail with the installed packages too.
        """
        check: Callable[..., CheckReport] = find_method("check")
        return check(
            self,
            self._trainwright.run,
            plans_memory=memory or budget is not None,
            budget=budget,
            processes=processes,
            per_node=per_node,
            engine=engine,
            against=against,
        )

    def prove(self, *, num_steps: int = 4) -> ProofReport:
        """Computes pairs of results that must be equal, on copies of the model and on the first samples.

        It compares a resumed run with an uninterrupted one, two ways to accumulate, two sizes of evaluation batches,
        and one process with two.

        Args:
            num_steps: optimizer steps of each short run.
        """
        prove: Callable[..., ProofReport] = find_method("prove")
        return prove(self, self._trainwright.run, num_steps=num_steps)

    def compare_with(self, other: Trainer, *, num_steps: int = 2, tolerance: float | None = None) -> ValuesReport:
        """Trains the first steps of this trainer and of another, on copies, and finds the first value that differs.

        Every value is compared, in the order in which a step computes it: random states, samples, weights, inputs and
        outputs of each module, the loss, gradients, and new weights. Both trainers stay as they are; callbacks and
        extensions of the user do not take part. It needs one process that holds the whole model.

        Args:
            other: a trainer of the same model, with other settings, data, kernels or weights.
            num_steps: optimizer steps to compare.
            tolerance: difference of a tensor, relative to its norm, that counts as none; then types may differ too.
                None: all bits must be the same.

        Returns:
            The report: `is_same`, and `first`, with the step, the module and its class, and the difference. `print`
            shows it.

        Raises:
            ArgumentError: `num_steps` is below 1.
            ModelError: the trainers need several processes, or memory for the copies is too short.
        """
        compare: Callable[..., ValuesReport] = find_method("compare_with")
        return compare(self, self._trainwright.run, other, num_steps=num_steps, tolerance=tolerance)


# As defined above: a class whose methods were replaced afterwards has others.
LOSS_CONTEXTS = (Trainer.compute_loss_context_manager, Trainer.autocast_smart_context_manager)
PREPARE_CONTEXT_PARALLEL = Trainer._prepare_context_parallel_inputs
HAS_MIXED_MESH_GRADS = Trainer._has_mixed_mesh_grads


PASSES = DrivePasses(begin=Trainer._begin_forward, differentiate=Trainer._differentiate)


def __getattr__(name: str) -> Any:
    """Returns names that scripts import from the transformers module of the same name."""
    return sys.modules[__package__]._at_original_path("trainer", name)  # the package has the table of names


watch(sys.modules[__name__])
