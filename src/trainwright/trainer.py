"""Trainer: the façade. It *is* the hooks that the loops call; each default is a few lines that call a wing."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainwright import assemble, checks, model_facts
from trainwright.checkpoint import items, weights
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import resolve, rules
from trainwright.config.arguments import TrainingArguments
from trainwright.config.plans import StepPlan
from trainwright.data import columns
from trainwright.data.collators import default_collator
from trainwright.data.plan import build_dataloader
from trainwright.engine.precision import DTYPES, eval_precision
from trainwright.errors import DataError, MetricError, NotYetError
from trainwright.loop import evaluate as eval_loop
from trainwright.loop import predict as eval_step
from trainwright.loop.fit import fit, run_epoch
from trainwright.loop.session import Session, Start
from trainwright.metrics import report
from trainwright.metrics.memory import TrainerMemoryTracker
from trainwright.metrics.speed import speed_metrics, step_logs
from trainwright.metrics.types import EvalLoopOutput, PredictionOutput, TrainOutput
from trainwright.metrics.tokens import count_tokens
from trainwright.optim import build, groups, modes, schedules
from trainwright.patches.special_tokens import align_special_tokens
from trainwright.state.control import TrainerControl
from trainwright.state.run import RunState
from trainwright.state.trainer_state import TrainerState
from trainwright.types import TRAINER_STATE_NAME, Batch, has_length, is_instance_of, output_loss

logger = logging.getLogger(__name__)

Items = torch.Tensor | int | None


class Trainer:
    """Trains and evaluates a model.

    Args:
        model: a `PreTrainedModel`, a PEFT model, or any `nn.Module` that returns a dict, a ModelOutput, or a tuple
            with the loss first.
        args: the settings; default `TrainingArguments("tmp_trainer")`.
        data_collator: makes a batch of a list of samples; default pads with `processing_class`, or stacks.
        train_dataset: samples to train on; map-style, iterable, or a `datasets.Dataset`.
        eval_dataset: samples to evaluate on, or a dict of several sets by name.
        processing_class: tokenizer, image processor, feature extractor or processor; saved with the model.
        model_init: makes the model; called again for each `train()`. Takes nothing, or the trial of a search.
        compute_loss_func: `(outputs, labels, num_items_in_batch) -> loss`, in place of the model's own.
        compute_metrics: from an `EvalPrediction` to a dict of numbers.
        callbacks: classes or instances, in addition to the default ones.
        optimizers: an optimizer and a schedule of your own; None for the one that the arguments name.
        optimizer_cls_and_kwargs: an optimizer class and its arguments, given the decay groups.
        preprocess_logits_for_metrics: `(logits, labels) -> logits`, applied to each batch before it is kept.
        tokenizer: older name of `processing_class`.

    Raises:
        MissingModelError, ModelError: no model, two of them, or one without a head.
        DataError: data whose length or absence makes the settings impossible.
        ArgumentError: settings that contradict each other.
    """

    loss_is_scaled_for_ga: bool | None = None
    """Whether `compute_loss` returns a loss scaled for the whole window: True as it is, False a mean per micro-batch,
    None (default): scaled if the model or `compute_loss_func` was given `num_items_in_batch`."""

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
        checks.check_models(model, model_init)
        self.args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        checks.refuse_what_is_missing(self.args)
        assemble.seed_everything(self.args)
        self._memory_tracker = TrainerMemoryTracker(self.args.skip_memory_metrics)
        self._memory_tracker.start("init")
        logging.getLogger("trainwright").setLevel(self.args.get_process_log_level())
        self._run = RunState(TrainerState(), TrainerControl())
        self._run_id = assemble.new_run_id()
        self.is_in_train = False
        self.deepspeed = None
        self.hp_name: Any = None
        self.hp_search_backend: Any = None
        self.hub_model_id: str | None = None
        self.push_in_progress: Any = None
        self.processing_class = assemble.one_processing_class(processing_class, tokenizer)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.model = model
        self.create_accelerator_and_postprocess()
        self._adopt_model(model, model_init)
        self.data_collator = data_collator if data_collator is not None else default_collator(self.processing_class)
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        checks.check_optimizers(optimizers, optimizer_cls_and_kwargs, model_init)
        checks.check_datasets(self.args, train_dataset, eval_dataset, self.data_collator)
        checks.check_metrics(self.args, compute_metrics)
        self._init_bookkeeping()
        self.callback_handler = assemble.make_callbacks(
            self.args,
            callbacks,
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
        )
        if self.args.should_save:
            os.makedirs(self.args.output_dir, exist_ok=True)
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=self._stateful(),
        )
        self.callback_handler.fire("on_init_end", self._run)
        self._memory_tracker.stop_and_update_metrics(stage="init")

    def _adopt_model(self, model: Any, model_init: Callable[..., Any] | None) -> None:
        """Takes the model in: on its device, with what its class and signature tell."""
        self.model_init = model_init
        model = self.call_model_init() if model is None else model
        checks.check_head(model, _names_of_base_models(model))
        self.is_model_parallel = len(set(getattr(model, "hf_device_map", {}).values()) - {"cpu", "disk"}) > 1
        placed = self.args.place_model_on_device
        self.place_model_on_device = not self.is_model_parallel if placed is None else placed
        if self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)
        self.model = self.model_wrapped = model
        self.model_accepts_loss_kwargs = model_facts.accepts_loss_kwargs(model)
        self.can_return_loss = model_facts.returns_loss_by_default(model)
        names = self.args.label_names
        self.label_names = model_facts.find_label_names(model) if names is None else names
        self.label_smoother = assemble.label_smoother(model, self.args.label_smoothing_factor)
        if getattr(model, "config", None) is not None:
            model.config.use_cache = self.args.use_cache

    def _init_bookkeeping(self) -> None:
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._signature_columns: list[str] | None = None
        self._train_batch_size = self.args.train_batch_size
        self._eval_dataloaders: dict[str, Any] = {}
        self._created_lr_scheduler = False
        self._loader: Any = None
        self._plan: StepPlan | None = None
        self._rule: Any = None
        self._flos_model: Any = None
        self._flos_per_token = 0

    # -- what changes during training has one owner ---------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        return self._run.state

    @state.setter
    def state(self, value: TrainerState) -> None:
        self._run.state = value

    @property
    def control(self) -> TrainerControl:
        return self._run.control

    @control.setter
    def control(self, value: TrainerControl) -> None:
        self._run.control = value

    @property
    def current_flos(self) -> float:
        return self._run.flos

    @current_flos.setter
    def current_flos(self, value: float) -> None:
        self._run.flos = value

    @property
    def _tr_loss(self) -> torch.Tensor:
        return self._run.meter.total

    @property
    def _total_loss_scalar(self) -> float:
        return self._run.total_loss

    @_total_loss_scalar.setter
    def _total_loss_scalar(self, value: float) -> None:
        self._run.total_loss = value

    @property
    def _globalstep_last_logged(self) -> int:
        return self._run.step_last_logged

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, value: int) -> None:
        self._run.step_last_logged = value

    @property
    def tokenizer(self) -> Any:
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    # -- engine and model -----------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the engine, and with it `accelerator`."""
        self._engine = assemble.make_engine(self.args)
        self.accelerator = self._engine.accelerator
        self.gather_function: Callable[[Any], Any] = self._engine.gather
        self.is_deepspeed_enabled = getattr(self.accelerator.state, "deepspeed_plugin", None) is not None
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from `model_init`."""
        assert self.model_init is not None
        return assemble.call_model_init(self.model_init, trial)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if getattr(model, "hf_device_map", None) is None:
            self._engine.place(model)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model as it is run; on one device it is the model itself."""
        return model if training else self._engine.setup_for_evaluation(model)

    def _loss_rule(self) -> Any:
        return assemble.loss_rule(
            self.model,
            self.args,
            accepts_loss_kwargs=self.model_accepts_loss_kwargs,
            has_loss_func=self.compute_loss_func is not None,
            is_scaled=self.loss_is_scaled_for_ga,
            num_processes=self._engine.num_processes,
        )

    # -- data -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The training data in batches."""
        if self.train_dataset is None:
            raise DataError("Training needs a train_dataset; pass one to Trainer.")
        return self._get_dataloader(
            self.train_dataset, "Training", self._train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Evaluation data in batches: a dataset, the name of one in `eval_dataset`, or `eval_dataset` itself."""
        if eval_dataset is None and self.eval_dataset is None:
            raise DataError("Evaluation needs an eval_dataset; pass one to Trainer or to evaluate().")
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if key in self._eval_dataloaders and self.args.dataloader_persistent_workers:
            return self._eval_dataloaders[key]  # type: ignore[no-any-return]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        return self._get_dataloader(
            dataset, "Evaluation", self.args.eval_batch_size, self._get_eval_sampler, dataloader_key=key
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Data to predict on, in batches."""
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
        if columns.is_columnar(dataset):
            dataset, collate = self._remove_unused_columns(dataset, description=description), self.data_collator
        else:
            collate = self._get_collator_with_removed_columns(self.data_collator, description=description)
        seed = self.args.data_seed if self.args.data_seed is not None else torch.initial_seed()
        plan = resolve.loader(self.args, batch_size=batch_size, seed=seed, is_training=is_training)
        sampler = None if sampler_fn is None or isinstance(dataset, IterableDataset) else sampler_fn(dataset)
        dataloader = build_dataloader(dataset, plan, sampler=sampler, collate=collate)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self._eval_dataloaders[dataloader_key] = dataloader
        return dataloader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of training samples; a RandomSampler is shuffled by seed and epoch."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return assemble.train_sampler(self.args, dataset, self._length_input())

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return assemble.eval_sampler(self.args, eval_dataset, self._length_input())

    def _length_input(self) -> str | None:
        names = getattr(self.processing_class, "model_input_names", None)
        return names[0] if names else None

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = model_facts.signature_columns(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A `datasets.Dataset` without the columns that `forward` does not take."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        name = type(self.model).__name__
        return columns.remove_unused(dataset, self._signature_columns, model_name=name, description=description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """The collator, given only the entries of each sample that `forward` takes."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        return columns.RemoveColumnsCollator(
            data_collator, self._signature_columns, columns.module_logger, type(self.model).__name__, description
        )

    def num_examples(self, dataloader: Any) -> int:
        """Samples behind a dataloader; estimated from its batches where the dataset has no length."""
        dataset = getattr(dataloader, "dataset", None)
        if has_length(dataset):
            return len(dataset)
        return len(dataloader) * self.args.per_device_train_batch_size

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Input tokens in a dataloader, or in `max_steps` passes' worth of its first batches."""
        total = 0
        for batch in train_dl:
            tokens = batch["input_ids"].numel()
            if max_steps is not None:
                return tokens * max_steps
            total += tokens
        return total

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Items]:
        """The micro-batches of one optimizer step (fewer at the end of the data) and their number of label items."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Items:
        """Label items over all micro-batches, if the model or the loss function asks for them."""
        count = (self._rule or self._loss_rule()).count(batch_samples)
        return None if count is None else count.to(device)

    def _prepare_input(self, data: Any) -> Any:
        """Tensors on the device; nested containers keep their type."""
        if isinstance(data, torch.Tensor):
            return data.to(self.args.device)
        if isinstance(data, Mapping):
            return type(data)({key: self._prepare_input(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(value) for value in data)
        return data

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """A batch as the model gets it."""
        if not isinstance(inputs, Mapping):
            raise DataError(
                f"A batch is a {type(inputs).__name__}; it must be a dict from the model's inputs to tensors. Let the "
                "data_collator return one, or override _prepare_inputs."
            )
        if not inputs:
            raise DataError(
                f"A batch is empty: no entry of the samples is an input of {type(self.model).__name__}.forward "
                f"({', '.join(self._signature_columns or ())}). Rename them, or set remove_unused_columns=False."
            )
        return self._prepare_input(inputs)  # type: ignore[no-any-return]

    # -- lengths --------------------------------------------------------------------------------------------------

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, float, int, int | None, int]:
        """(epochs, optimizer steps per epoch, samples, samples trained, total batch size, batches per epoch, steps)."""
        known = has_length(dataloader)
        lengths = resolve.lengths(
            args,
            num_batches=len(dataloader) if known else None,
            num_examples=self.num_examples(dataloader) if known else None,
            total_batch_size=self.get_total_train_batch_size(args),
        )
        return lengths.values()

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples per optimizer step over all processes that have data of their own."""
        replicas = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return int(self._train_batch_size * args.gradient_accumulation_steps * replicas)

    def get_sp_size(self) -> int:
        """Processes that share a sequence (sequence parallelism)."""
        return self._parallel_size("sp_size")

    def get_cp_size(self) -> int:
        """Processes that share a sequence (context parallelism)."""
        return self._parallel_size("cp_size")

    def get_tp_size(self) -> int:
        """Processes that share a layer (tensor parallelism)."""
        size = getattr(self.model, "_tp_size", None)
        return size if size is not None else self._parallel_size("tp_size")

    def _parallel_size(self, name: str) -> int:
        config = getattr(self.accelerator, "parallelism_config", None)
        return 1 if config is None else int(getattr(config, name))

    # -- optimizer and schedule -----------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Makes both; override this, or one of the two below."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer, unless there is one already."""
        model = self.model if model is None else model
        if self.optimizer is None:
            cls, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            decays = self.get_decay_parameter_names(model)
            param_groups = groups.decay_groups(model, decays, self.args.weight_decay)
            self.optimizer = build.build_optimizer(cls, dict(kwargs), model, param_groups)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning-rate schedule, unless there is one already."""
        if self.lr_scheduler is None:
            self.lr_scheduler = schedules.make_schedule(
                self.args.lr_scheduler_type,
                self.optimizer if optimizer is None else optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                options=self.args.lr_scheduler_kwargs,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Class and arguments of the optimizer that `args.optim` names."""
        return build.optimizer_class_and_kwargs(args)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters that weight decay applies to: all but biases and those of normalisation layers."""
        return groups.decay_parameter_names(model)

    def _make_optimizer(self, model: nn.Module, num_training_steps: int) -> Any:
        if type(self).create_optimizer_and_scheduler is not Trainer.create_optimizer_and_scheduler:
            self.create_optimizer_and_scheduler(num_training_steps=num_training_steps)
            return self.optimizer
        return self.create_optimizer()

    def _get_learning_rate(self) -> float:
        """Learning rate of the first parameter group."""
        return schedules.current_rate(self.lr_scheduler, self.optimizer)

    def get_learning_rates(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self._need_optimizer().param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The parameter group of a parameter; without one, the parameters of all groups."""
        param_groups = self._need_optimizer().param_groups
        if param is None:
            return [group["params"] for group in param_groups]
        return next((group for group in param_groups if any(p is param for p in group["params"])), None)

    def get_num_trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def _need_optimizer(self) -> Any:
        if self.optimizer is None:
            raise ValueError("There is no optimizer yet: it is made by train(), or by create_optimizer().")
        return self.optimizer

    # -- training -------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains the model.

        Args:
            resume_from_checkpoint: directory of a checkpoint to go on from; True for the newest complete one in
                `output_dir`; None for `args.resume_from_checkpoint`, or a fresh start.
            trial: settings of a hyperparameter search.
            ignore_keys_for_eval: entries of the model's output that evaluations leave out of the predictions.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged or of another run.
        """
        self._memory_tracker.start("train")
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        checkpoint = assemble.find_checkpoint(asked, self.args.output_dir)
        self.is_in_train = True
        try:
            self._renew_model(trial)
            self._hp_search_setup(trial)
            align_special_tokens(self.model, self.processing_class)
            if checkpoint is not None:
                self._load_from_checkpoint(checkpoint)
            return self._inner_training_loop(
                batch_size=self._train_batch_size,
                args=self.args,
                resume_from_checkpoint=checkpoint,
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )
        except BaseException as error:
            self.callback_handler.fire("on_exception", self._run, exception=error)
            raise
        finally:
            self.is_in_train = False
            self._rule = None

    def _renew_model(self, trial: Any) -> None:
        if self.model_init is None:
            return
        assemble.seed_everything(self.args)
        self.model = self.model_wrapped = self.call_model_init(trial)
        self.optimizer, self.lr_scheduler = None, None
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """A whole run, from the dataloader to the last metric."""
        args = self.args if args is None else args
        self._train_batch_size = batch_size if batch_size is not None else self._train_batch_size
        dataloader = self.get_train_dataloader()
        checks.check_not_empty(self.train_dataset, dataloader)
        self._plan = plan = StepPlan.from_values(
            self.set_initial_training_values(args, dataloader),
            micro_batches=args.gradient_accumulation_steps,
            max_grad_norm=args.max_grad_norm,
        )
        rules.check_run(args, assemble.facts(plan, vars(self), self._engine.device))
        self._loader = assemble.make_loader(dataloader)
        epoch, batches = self._init_training_state(
            plan.max_steps, plan.steps_per_epoch, plan.num_epochs, resume_from_checkpoint, trial
        )
        model, loader = self._prepare_for_training(plan.max_steps, self._loader, resume_from_checkpoint)
        self._rule = self._loss_rule()
        self._run.begin(device=self._engine.device, skip_non_finite=args.logging_nan_inf_filter)
        self._session = Session(
            engine=self._engine,
            model=model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            loader=loader,
            plan=plan,
            rule=self._rule,
            events=self.callback_handler,
            start=Start(epoch=epoch, batches=batches, checkpoint=resume_from_checkpoint),
            scheduler_follows_metrics=schedules.follows_metrics(self.lr_scheduler),
            trial=trial,
            ignore_keys_for_eval=ignore_keys_for_eval,
        )
        assemble.announce(plan, args, start=self._session.start)
        fit(self._session, self._run, self, eval_on_start=args.eval_on_start)
        return self._finalize_training(trial, plan.num_train_samples, self._run.start_time)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Fills `state`, from the checkpoint if there is one; returns the first epoch and its batches done already."""
        assert self._plan is not None
        self.state = state = assemble.initial_state(resume_from_checkpoint, self._stateful())
        state.train_batch_size = self._train_batch_size
        state.compute_steps(self.args, max_steps)
        state.max_steps, state.num_train_epochs = max_steps, num_train_epochs
        state.is_hyper_param_search = trial is not None
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()
        manifest = assemble.manifest_of(resume_from_checkpoint)
        self._run_id = manifest.run_id if manifest is not None else assemble.new_run_id()
        if resume_from_checkpoint is None:
            return 0, 0
        self._load_callback_state()
        micro_batches = self.args.gradient_accumulation_steps
        assemble.check_same_steps(manifest, batch_size=self._train_batch_size, micro_batches=micro_batches)
        assemble.resume_loader(self._loader, resume_from_checkpoint, manifest)
        epoch, steps = divmod(state.global_step, num_update_steps_per_epoch)
        return epoch, 0 if self.args.ignore_data_skip else steps * micro_batches

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """The model as it is trained and the loader; makes optimizer and schedule, and loads their states."""
        if self._created_lr_scheduler:  # its length belonged to an earlier train()
            self.lr_scheduler, self._created_lr_scheduler = None, False
        prepared = self._engine.setup(
            self._wrap_model(self.model),
            make_optimizer=lambda model: self._make_optimizer(model, max_steps),
            make_scheduler=lambda optimizer: self.create_scheduler(num_training_steps=max_steps, optimizer=optimizer),
        )
        self.model_wrapped, self.optimizer, self.lr_scheduler = prepared.model, prepared.optimizer, prepared.scheduler
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self._load_scaler(resume_from_checkpoint)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = getattr(train_dataloader, "dataloader", train_dataloader)
        handler.rebuild()
        modes.train_mode(self.model_wrapped, self.optimizer)
        return self.model_wrapped, train_dataloader

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
        """One pass over the training data."""
        run_epoch(self._session, self._run, self, epoch)

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Items = None) -> torch.Tensor:
        """Forward and backward for one micro-batch; returns its loss as it enters the window's sum, detached."""
        if not model.training:
            modes.train_mode(model, self.optimizer)
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        del inputs
        rule = self._rule or self._loss_rule()
        loss = rule.apply(loss, num_items_in_batch, micro_batches=self.current_gradient_accumulation_steps)
        self._engine.backward(loss)
        return loss.detach()

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Items = None
    ) -> Any:
        """The loss of a micro-batch, and with `return_outputs` the model's output beside it.

        An override that computes a loss of its own says by `loss_is_scaled_for_ga` whether it is scaled already.
        """
        labels = None
        if self.label_smoother is not None or self.compute_loss_func is not None:
            labels = inputs.pop("labels", None)
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif labels is not None and self.label_smoother is not None:
            shift = model_facts.is_causal_lm(self._engine.unwrap(model))
            loss = self.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=num_items_in_batch)
        else:
            loss = output_loss(outputs)
        if not isinstance(loss, torch.Tensor):
            checks.raise_no_loss(model, inputs, outputs)
        loss = (self._rule or self._loss_rule()).undo_averaging(loss, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """The contexts in which the loss is computed."""
        stack = contextlib.ExitStack()
        stack.enter_context(self.autocast_smart_context_manager())
        return stack

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Autocast to the mixed-precision type; nothing in full precision."""
        return self._engine.autocast() or contextlib.nullcontext()

    def _clip_grad_norm(self, model: Any) -> Any:
        """Scales the gradients down to `max_grad_norm`; returns their norm before, on the device."""
        return self._engine.clip(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm of the gradients, measured if clipping has not done so."""
        return self._engine.clip(model, math.inf) if grad_norm is None else grad_norm

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        """Counts the input tokens of a micro-batch, on the device."""
        if self.args.include_num_input_tokens_seen == "no":
            return
        self._run.tokens = self._run.tokens + count_tokens(
            inputs, self.model, self.processing_class, mode=self.args.include_num_input_tokens_seen
        )

    def floating_point_ops(self, inputs: Batch) -> float:
        """Estimated operations of forward and backward: 6 x parameters (without embeddings) x tokens."""
        if self._flos_model is not self.model:  # counting parameters walks over the model: once per model
            self._flos_model = self.model
            self._flos_per_token = 6 * model_facts.num_parameters_without_embeddings(self.model)
            self._main_input = model_facts.main_input_name(self.model)
        main_input = inputs.get(self._main_input)
        return 0 if main_input is None else self._flos_per_token * main_input.numel()

    def store_flos(self) -> None:
        """Moves the operations counted since the last call into `state.total_flos`."""
        self._run.settle()

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Metrics, the best model if it was asked for, and the end of the callbacks."""
        assert self._plan is not None
        run, plan = self._run, self._plan
        num_steps = run.state.global_step - run.first_step
        train_loss = run.finish_loss() / max(num_steps, 0.001)
        share = num_steps / max(run.state.max_steps, 1)
        tokens = run.state.num_input_tokens_seen - run.first_tokens
        counts_tokens = self.args.include_num_input_tokens_seen != "no"
        metrics = speed_metrics(
            "train",
            start_time,
            num_samples=(num_train_samples or plan.num_train_samples) * share,
            num_steps=num_steps,
            num_tokens=tokens if counts_tokens else None,
        )
        self.store_flos()
        metrics |= {"total_flos": run.state.total_flos, "train_loss": train_loss}
        self._memory_tracker.stop_and_update_metrics(metrics, stage="train")
        self.log(metrics)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.callback_handler.fire("on_train_end", run)
        self._finish_current_push()
        return TrainOutput(run.state.global_step, train_loss, metrics)

    # -- log, evaluate, save --------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Does what the flags ask for after a step."""
        control = self._run.control
        if not (control.should_log or control.should_evaluate or control.should_save):
            return
        if control.should_log and self.state.global_step > self._run.step_last_logged:
            loss, num_non_finite = self._run.drain_loss()
            rate = self._get_learning_rate() if learning_rate is None else learning_rate
            self.store_flos()
            self.log(step_logs(loss, grad_norm, rate, num_non_finite), start_time)
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            is_best = self._determine_best_metric(metrics=metrics, trial=trial)
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self.callback_handler.fire("on_save", self._run)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Records values and tells the callbacks; adds the epoch, and the tokens where they are counted."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            self._run.settle_tokens()
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - self._run.first_tokens
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.callback_handler.fire("on_log", self._run, logs=logs)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """An evaluation in the middle of training; drives the schedules that follow a metric."""
        metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if schedules.follows_metrics(self.lr_scheduler) and not skip_scheduler:
            self.lr_scheduler.step(self._best_metric_of(metrics))
        return metrics

    def _best_metric_of(self, metrics: Mapping[str, float]) -> float:
        name = self.args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise MetricError(
                f"metric_for_best_model={self.args.metric_for_best_model!r}, but the evaluation gave no {name!r}; it "
                f"gave {', '.join(sorted(metrics))}. Name one of these, or return it from compute_metrics."
            )
        return metrics[name]

    def _determine_best_metric(self, metrics: Mapping[str, float], trial: Any) -> bool:
        """Whether these metrics are the best so far; remembers them if so. NaN is never the best."""
        if self.args.metric_for_best_model is None:
            return False
        value, best = self._best_metric_of(metrics), self.state.best_metric
        is_better = value == value and (
            best is None or (value > best if self.args.greater_is_better else value < best)
        )
        if is_better:
            self.state.best_metric = value
            if self.args.save_strategy != "no":
                self.state.best_global_step = self.state.global_step
        return bool(is_better)

    # -- evaluation and prediction --------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates the model; several sets (a dict) one after the other.

        Args:
            eval_dataset: data to use in place of the trainer's.
            ignore_keys: entries of the model's output that are no predictions.
            metric_key_prefix: first part of the metrics' names; a set's name follows it.

        Returns:
            `<prefix>_loss`, the metrics, run time in seconds and rates per second.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            results: dict[str, float] = {}
            for name, part in dataset.items():
                chosen = name if eval_dataset is None else part
                results |= self.evaluate(chosen, ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return results
        self._memory_tracker.start("eval")
        dataloader = self.get_eval_dataloader(eval_dataset)
        output = self._timed_loop(
            dataloader, "Evaluation", True if self.compute_metrics is None else None, ignore_keys, metric_key_prefix
        )
        assert output.metrics is not None
        self.log(output.metrics)
        self.callback_handler.fire("on_evaluate", self._run, metrics=output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics, stage="eval")
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for a dataset, one row for each sample, in order; and metrics if it has labels."""
        self._memory_tracker.start("test")
        output = self._timed_loop(
            self.get_test_dataloader(test_dataset), "Prediction", None, ignore_keys, metric_key_prefix
        )
        self.callback_handler.fire("on_predict", self._run, metrics=output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics, stage="test")
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def _timed_loop(
        self, dataloader: Any, description: str, loss_only: bool | None, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        start_time = time.time()
        with assemble.untouched_randomness(), eval_precision(self.model, None if self.is_in_train else self._full_eval_type()):
            output = self.evaluation_loop(
                dataloader,
                description=description,
                prediction_loss_only=loss_only,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
        num_steps = math.ceil((output.num_samples or 0) / (self.args.eval_batch_size * self.args.world_size))
        assert output.metrics is not None
        output.metrics.update(speed_metrics(prefix, start_time, num_samples=output.num_samples, num_steps=num_steps))
        return output

    def _full_eval_type(self) -> torch.dtype | None:
        return DTYPES["fp16"] if self.args.fp16_full_eval else DTYPES["bf16"] if self.args.bf16_full_eval else None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Runs the model over a dataloader; serves both `evaluate` and `predict`."""
        model = self._wrap_model(self.model, training=False)
        modes.eval_mode(model, self.optimizer)
        self.callback_handler.eval_dataloader = dataloader
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        is_prediction = description == "Prediction"
        session = eval_loop.EvalSession(
            plan=resolve.evaluation(self.args),
            model=model,
            rule=self._rule or self._loss_rule(),
            events=self.callback_handler,
            gather=self.gather_function,
            label_names=self.label_names,
            main_input=model_facts.main_input_name(self.model),
            compute_metrics=self.compute_metrics,
            preprocess_logits=self.preprocess_logits_for_metrics,
            loss_only=loss_only,
            needs_labels=not is_prediction,
            keeps_results=is_prediction or not self.args.batch_eval_metrics,
            ignore_keys=ignore_keys,
        )
        return eval_loop.evaluation_loop(session, self._run, self, dataloader, prefix=metric_key_prefix)

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Older name of `evaluation_loop`."""
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def prediction_step(
        self, model: Any, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, logits and labels of one batch, each None where there is none."""
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = [] if config is None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])

        def loss_and_outputs(batch: Batch) -> tuple[torch.Tensor, Any]:
            num_items = self._get_num_items_in_batch([batch], self.args.device)
            with self.compute_loss_context_manager():
                return self.compute_loss(model, batch, return_outputs=True, num_items_in_batch=num_items)  # type: ignore[no-any-return]

        def outputs_only(batch: Batch) -> Any:
            with self.compute_loss_context_manager():
                return model(**batch)

        return_loss = inputs.get("return_loss")
        return eval_step.prediction_step(
            inputs,
            label_names=self.label_names,
            returns_loss=self.can_return_loss if return_loss is None else bool(return_loss),
            loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            loss_and_outputs=loss_and_outputs,
            outputs_only=outputs_only,
        )

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """Where this run writes."""
        if trial is not None:
            _not_yet("hyperparameter_search", "Call train() in a loop over settings meanwhile.")
        return str(self.args.output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes `checkpoint-<step>` as a whole or not at all, then deletes what `save_total_limit` allows."""
        self.store_flos()
        step = self.state.global_step
        store = CheckpointStore(self._get_output_dir(trial))
        manifest = Manifest(step=step, run_id=self._run_id, world_size=self.args.world_size, cursor=self._cursor())
        with assemble.staged_checkpoint(store, manifest) as staging:
            folder = str(staging)
            self.save_model(folder, _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(folder)
                self._save_scaler(folder)
                self._save_rng_state(folder)
            best = self.state.best_global_step
            if best is not None and (best == step or store.path(best).is_dir()):
                self.state.best_model_checkpoint = str(store.path(best))
            assemble.write_state(self.state, self._stateful(), Path(folder))
        assemble.rotate(store, self.args, run_id=self._run_id, best=self.state.best_global_step)

    def _cursor(self) -> dict[str, Any] | None:
        if self._loader is None or self._plan is None:
            return None
        run, plan = self._run, self._plan
        cursor = self._loader.cursor(run.epoch, run.batches_in_epoch, batches_per_epoch=plan.batches_per_epoch)
        return {**cursor.to_dict(), "batch_size": self._train_batch_size, "micro_batches": plan.micro_batches}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model so that `from_pretrained` loads it, with the processing class and the arguments."""
        self._save(self.args.output_dir if output_dir is None else output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if not self.args.should_save:
            return
        weights.save_weights(self._engine.unwrap(self.model), folder, state_dict=state_dict)
        processing_class = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        items.save_arguments(self.args, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        items.save_optimizer(self.optimizer, self.lr_scheduler, Path(output_dir))

    def _save_scaler(self, output_dir: str) -> None:
        items.save_scaler(getattr(self.accelerator, "scaler", None), Path(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        assemble.save_rng(output_dir, self._loader)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint into the model."""
        weights.load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint."""
        assert self.state.best_model_checkpoint is not None
        folder = Path(self.state.best_model_checkpoint)
        logger.info("Loading the best model, %s (%s).", folder, self.state.best_metric)
        weights.load_weights(self.model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            items.load_optimizer(self.optimizer, self.lr_scheduler, Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            items.load_scaler(getattr(self.accelerator, "scaler", None), Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            assemble.load_rng(checkpoint)

    def _load_callback_state(self) -> None:
        """Gives callbacks the state that the checkpoint has of them."""
        assemble.restore_callbacks(
            self.state.stateful_callbacks,
            self.callback_handler.callbacks,
            with_settings=self.args.restore_callback_states_from_checkpoint,
        )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Says which weights a checkpoint lacked or had too much."""
        for kind in ("missing_keys", "unexpected_keys"):
            names = getattr(load_result, kind)
            if names:
                logger.warning("Loading the weights: %s: %s.", kind.replace("_", " "), ", ".join(names))

    def _stateful(self) -> list[Any]:
        parts = [*self.callback_handler.callbacks, self.control]
        return [part for part in parts if callable(getattr(part, "state", None))]

    # -- results --------------------------------------------------------------------------------------------------

    @staticmethod
    def metrics_format(metrics: dict[str, float]) -> dict[str, Any]:
        """Metrics as a person reads them."""
        return report.metrics_format(metrics)

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Prints metrics, aligned."""
        if self.is_world_process_zero():
            report.print_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Writes `<split>_results.json`, and with `combined` adds them to `all_results.json`."""
        if self.is_world_process_zero():
            report.save_metrics(self.args.output_dir, split, metrics, combined=combined)

    def save_state(self) -> None:
        """Writes `trainer_state.json` to the output directory."""
        if self.is_world_process_zero():
            self.state.save_to_json(Path(self.args.output_dir) / TRAINER_STATE_NAME)

    # -- callbacks and processes ----------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, an instance or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback and returns it; None if it is not there."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of this machine."""
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of all."""
        return bool(self.args.process_index == 0)

    def end(self) -> None:
        """Ends trackers and process groups; nothing that needs other processes works after it."""
        self.accelerator.end_training()

    # -- not there yet --------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        _not_yet("init_hf_repo", "Create the repository with huggingface_hub.create_repo.")

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
        _not_yet("create_model_card", "Write one with huggingface_hub.ModelCard.")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        _not_yet("push_to_hub", "Call save_model(), then huggingface_hub.upload_folder.")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        _not_yet("push_to_hub", "Upload the checkpoint with huggingface_hub.upload_folder.")

    def _finish_current_push(self) -> None:
        """Waits for an upload that is under way; there is none."""

    def hyperparameter_search(
        self,
        hp_space: Callable[..., Any] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[..., str] | None = None,
        **kwargs: Any,
    ) -> Any:
        _not_yet("hyperparameter_search", "Call train() in a loop over settings meanwhile.")

    def _hp_search_setup(self, trial: Any) -> None:
        """Takes a trial's settings over; without a trial there is nothing to do."""
        if trial is not None:
            _not_yet("hyperparameter_search", "Set the arguments yourself and call train() without a trial.")

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Tells a search how a trial does; without a trial there is nothing to do."""

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        _not_yet("hyperparameter_search", "Ray Tune is not connected; save with save_model().")


def _not_yet(name: str, instead: str) -> NoReturn:
    raise NotYetError(f"{name} is not in this version of Trainwright. {instead}")


def _names_of_base_models(model: Any) -> frozenset[str]:
    """Class names of transformers' models without a head; only asked for a model of transformers."""
    if not is_instance_of(model, "transformers", "PreTrainedModel"):
        return frozenset()
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = (name for entry in MODEL_MAPPING_NAMES.values() for name in ([entry] if isinstance(entry, str) else entry))
    return frozenset(names)

