"""Trainer: the façade. It *is* the hooks that the loops call. Here it is made and `train()` begins; the published hooks
are in `facade/`, one family to a file, each a few lines that call a wing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainwright import assemble, checks, model_facts
from trainwright._types import is_instance_of
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.config import not_yet
from trainwright.config.arguments import TrainingArguments
from trainwright.config.owned import owned
from trainwright.data.collators import default_collator
from trainwright.evaluation.outputs import TrainOutput
from trainwright.facade.search import SearchHooks
from trainwright.patches.special_tokens import align_special_tokens
from trainwright.state.control import TrainerControl
from trainwright.state.memory_tracker import TrainerMemoryTracker
from trainwright.state.run_state import RunState
from trainwright.state.trainer_state import TrainerState


class Trainer(SearchHooks):
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
        if model_facts.num_devices(model) > 1:
            self.args._n_gpu = 1  # the model has the GPUs: it is not copied to them
        not_yet.refuse_what_is_missing(self.args)
        assemble.seed_everything(self.args)
        self._memory_tracker = TrainerMemoryTracker(self.args.skip_memory_metrics)
        self._memory_tracker.start("init")
        logging.getLogger("trainwright").setLevel(self.args.get_process_log_level())
        self._run = RunState(TrainerState(), TrainerControl())
        self._run_id = assemble.new_run_id()
        self._writer = CheckpointWriter(goes_on=getattr(self.args, "save_failure", "stop") == "continue")
        self._init_bookkeeping()
        self.processing_class = assemble.one_processing_class(processing_class, tokenizer)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.model = model
        self.create_accelerator_and_postprocess()
        self._adopt_model(model, model_init)
        multiple = owned(self.args, "pad_to_multiple_of")
        self._default_collator = default_collator(self.processing_class, multiple)
        self.data_collator = self._default_collator if data_collator is None else data_collator
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        checks.check_optimizers(self.args, optimizers, optimizer_cls_and_kwargs, model_init)
        own = optimizers[1] is not None
        checks.check_datasets(self.args, train_dataset, eval_dataset, self.data_collator, has_own_schedule=own)
        checks.check_metrics(self.args, compute_metrics)
        self._tell_of_the_start(callbacks)
        self._memory_tracker.stop_and_update_metrics(stage="init")

    def _tell_of_the_start(self, callbacks: list[Any] | None) -> None:
        """Who listens, where output goes, and the first state; then `on_init_end`."""
        self.callback_handler = assemble.make_callbacks(
            self.args,
            callbacks,
            engine=self._engine,
            writer=self._writer,
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
        )
        self._journal = assemble.make_keeper(self.callback_handler, self._run.clock)
        if self.args.push_to_hub:
            self.init_hf_repo()
        if self.args.should_save:
            os.makedirs(self.args.output_dir, exist_ok=True)
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=self._stateful(),
        )
        self.callback_handler.fire("on_init_end", self._run)

    def _adopt_model(self, model: Any, model_init: Callable[..., Any] | None) -> None:
        """Takes the model in: on its device, with what its class and signature tell."""
        self.model_init = model_init
        model = self.call_model_init() if model is None else model
        checks.check_head(model, _names_of_base_models(model))
        self.is_model_parallel = model_facts.num_devices(model) > 1
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
        """What is filled later, by training, evaluation, or a search."""
        self.is_in_train = False
        self.deepspeed = None
        self.hp_name = None
        self.hp_search_backend = None
        self.hp_space = self.compute_objective = self.objective = None
        self._trial = self._search = None
        self.hub_model_id = None
        self.push_in_progress = None
        self._uploader = None
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._signature_columns = None
        self._train_batch_size = self.args.train_batch_size
        self._eval_dataloaders = {}
        self._created_lr_scheduler = False
        self._before = None
        self._changes = []
        self._owed = False, False
        self._loader = None
        self._plan = None
        self._rule = None
        self._pause = None
        self._is_rehearsing = False
        self._flos_model = None
        self._flos_per_token = 0
        self._past = None
        self._past_index = getattr(self.args, "past_index", -1)

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the engine, and with it `accelerator`."""
        self._engine = assemble.make_engine(self.args, self.model)
        self.accelerator = self._engine.accelerator
        self.gather_function = self._engine.gather
        for name, value in self._engine.published_flags().items():
            setattr(self, name, value)

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from `model_init`."""
        assert self.model_init is not None
        return assemble.call_model_init(self.model_init, trial)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if getattr(model, "hf_device_map", None) is None:
            self._engine.place(model)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains the model.

        Args:
            resume_from_checkpoint: directory of a checkpoint to go on from; True for the newest complete one in
                `output_dir`; "auto" for that or, where there is none, a fresh start; None for
                `args.resume_from_checkpoint`, or a fresh start.
            trial: a trial of a hyperparameter search; outside of one, only `model_init` gets to see it.
            ignore_keys_for_eval: entries of the model's output that evaluations leave out of the predictions.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged or of another run.
        """
        self._hp_search_setup(trial)
        with self._engine.together(self._run.interrupts):
            return self._train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train(
        self, resume_from_checkpoint: str | bool | None, trial: Any, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        self._memory_tracker.start("train")
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        checkpoint = self._engine.agree(lambda: assemble.find_checkpoint(asked, self.args.output_dir))
        assemble.prepare_output(self.args, self._get_output_dir(trial), is_fresh=checkpoint is None)
        self.is_in_train = True
        try:
            self._renew_model(trial)
            align_special_tokens(self.model, self.processing_class)
            if checkpoint is not None:
                self._load_from_checkpoint(checkpoint)
            checks.check_trainable(self.model, getattr(self.args, "mixed_precision", "no"))
            with contextlib.ExitStack() as patches, self._run.interrupts.listening():
                for patch in assemble.patches_for_a_run(self.args, self.model):
                    patches.enter_context(patch)
                patches.enter_context(self._engine.mixed_precision(self.model, keeps_outputs=self._uses_outputs()))
                output = self._inner_training_loop(
                    batch_size=self._train_batch_size,
                    args=self.args,
                    resume_from_checkpoint=checkpoint,
                    trial=trial,
                    ignore_keys_for_eval=ignore_keys_for_eval,
                )
                self._writer.end()
            self._run.interrupts.leave()  # a signal that came when all was trained: it is on the disk too
            return output
        except BaseException as error:
            self._writer.end_after_failure()
            assemble.leave_uploads(self._uploader, error)
            self.callback_handler.fire("on_exception", self._run, exception=error)
            self._memory_tracker.abandon()
            raise
        finally:
            self.is_in_train = False
            self._rule = None
            self._pause = None

    def _renew_model(self, trial: Any) -> None:
        if self.model_init is None:
            return
        assemble.seed_everything(self.args)
        self.model = self.model_wrapped = self.call_model_init(trial)
        self.optimizer, self.lr_scheduler = None, None
        if trial is not None:
            self.label_smoother = assemble.label_smoother(self.model, self.args.label_smoothing_factor)
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, an instance or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback and returns it; None if it is not there."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback."""
        self.callback_handler.remove_callback(callback)

    def end(self) -> None:
        """Ends trackers and process groups; nothing that needs other processes works after it."""
        self.accelerator.end_training()


def _names_of_base_models(model: Any) -> frozenset[str]:
    """Class names of transformers' models without a head; only asked for a model of transformers."""
    if not is_instance_of(model, "transformers", "PreTrainedModel"):
        return frozenset()
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = (name for entry in MODEL_MAPPING_NAMES.values() for name in ([entry] if isinstance(entry, str) else entry))
    return frozenset(names)
