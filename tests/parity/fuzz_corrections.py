"""Differences that docs/migrate.md describes, by name, and a trainer of the original that has them corrected.

A correction is as narrow as it can be, is applied to the original before it trains where that is possible, so that all
that follows from it is compared too, and counts how often it changed something.
"""

# mypy: disable-error-code="misc"
# (a mix-in that calls what it is mixed into)

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import sys
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher, SkipBatchSampler
from transformers.trainer_utils import has_length


@dataclass(frozen=True)
class Correction:
    """A difference that docs/migrate.md describes.

    Attributes:
        row: words of its row there; a test looks for them.
    """

    name: str
    row: str


EVAL_LOSS = Correction("eval loss over items", "**`eval_loss`** is a mean over batches in transformers")
EVAL_DRAWS = Correction("evaluation draws no random numbers", "**Evaluating draws no random numbers.**")
SHIFTED = Correction("items of an undeclared causal loss", "**Causal models without a declared loss type**")
PREPARATION = Correction("no preparation time", "the first `evaluate` adds `eval_model_preparation_time`")
FILES = Correction("more files", "`training_args.json` is for people")
TOTAL_FLOS = Correction(
    "operations in the result", "without progress bars, the result of `train()` has no `total_flos`"
)
TOKEN_RATE = Correction("tokens per second of the run", "the last log and the result have no `train_tokens_per_second`")
HALF_ON_CPU = Correction("fp16 on the CPU", "`fp16=True` has no effect on the CPU")
NOISE = Correction("noise needs embeddings", "`neftune_noise_alpha` with a module that has no `get_input_embeddings`")
STOPPING = Correction(
    "early stopping needs a metric", "`EarlyStoppingCallback` without a metric or without evaluations"
)
METRIC = Correction("a metric that nobody computes", "a misspelt `metric_for_best_model`")
IN_ORDER = Correction("predictions in the order of the data", "predictions come in an order drawn at random")
NUM_LOSSES = Correction("a loss for each sample", 'with `include_for_metrics=["loss"]`')
NAMED_RESUME = Correction("a checkpoint in the arguments", "`args.resume_from_checkpoint` is left to the script")
WHOLE_EVALUATION = Correction("evaluation of all samples", "`dataloader_drop_last` drops samples of evaluations")
RENAMED = Correction("weights under renamed keys", "weights that `save_pretrained` renames")
NON_FINITE = Correction("losses that are not finite", "**A loss that is not finite** is logged as 0.0")
SCALARS = Correction("arrays of one dimension", "predictions that are one number a batch")
MORE_MODULES = Correction("settings of transformers' models", "with a module that is not a model of transformers")
NO_STATE = Correction("no resume without the optimizer", "a checkpoint of `save_only_model` is resumed")
INTERVALS = Correction("intervals of a resumed run", "a resumed run keeps the intervals of its checkpoint")
FINISHED = Correction("no step after the last", "a resume of a run that has done all its steps")
DRAWS = Correction("a resumed collator draws as before", "a resumed run draws other numbers if a collator draws")
GROUPED = Correction("a resumed order by length", "or in a later epoch if samples are grouped by length")
SHUFFLED = Correction("a resumed order without seeds", "or shuffled with `use_seedable_sampler=False`")
PASSES = Correction("passes of a resumed stream", "a resumed stream that has had more than one pass")
DISPATCHED = Correction("order of a resumed dispatcher", "with `dispatch_batches=True`, a resume within a later epoch")
IN_PLACE = Correction("a restored callback keeps its place", "puts a new object for a restored callback at the end")
OWN_CHECKPOINTS = Correction(
    "retention of this run's checkpoints", "`save_total_limit` counts and deletes all checkpoints"
)
NO_BATCH = Correction("epochs without a batch", "has `sys.maxsize` epochs in its state")
HALF_AFTER = Correction("half precision after an evaluation", "leaves the model in half precision")
GENERATION = Correction("generation_config beside model_init", "with `model_init`, `generation_config` is lost")
CACHE = Correction("use_cache beside model_init", "has its own `use_cache`")
INPUTS = Correction("inputs that no metric asks for", '`include_for_metrics=["inputs"]` without `compute_metrics`')
AFTERWARDS = Correction("evaluations after training", "`EarlyStoppingCallback` also counts evaluations after training")
START = Correction("no start at a resume", "with `eval_on_start`, each resume evaluates once more")
SEQ2SEQ = Correction("an optimizer's class for Seq2SeqTrainer", "`Seq2SeqTrainer` takes no `optimizer_cls_and_kwargs`")
TWO_MODELS = Correction(
    "model_init beside optimizers", "`model_init` together with `optimizers` ends in a `RuntimeError`"
)
TWO_FAULTS = Correction("the first of two errors", "of two errors in one configuration")
CORRECTIONS = (
    IN_ORDER,
    NUM_LOSSES,
    NAMED_RESUME,
    WHOLE_EVALUATION,
    NO_STATE,
    INTERVALS,
    FINISHED,
    DRAWS,
    GROUPED,
    SHUFFLED,
    PASSES,
    DISPATCHED,
    IN_PLACE,
    OWN_CHECKPOINTS,
    NO_BATCH,
    HALF_AFTER,
    GENERATION,
    CACHE,
    INPUTS,
    AFTERWARDS,
    START,
    SEQ2SEQ,
    TWO_MODELS,
    TWO_FAULTS,
    RENAMED,
    NON_FINITE,
    SCALARS,
    MORE_MODULES,
    HALF_ON_CPU,
    NOISE,
    STOPPING,
    METRIC,
    TOTAL_FLOS,
    TOKEN_RATE,
    EVAL_LOSS,
    EVAL_DRAWS,
    SHIFTED,
    PREPARATION,
    FILES,
)


@dataclass(frozen=True)
class Ends:
    """Two errors, or an error of one side alone, that a correction explains.

    Attributes:
        ours: words of our error; None if ours trains.
        theirs: words of the error of the original; None if it trains.
        fields: rows of the table of which a case has one.
    """

    correction: Correction
    ours: str | None
    theirs: str | None
    fields: tuple[str, ...]

    def explain(self, fields: Container[str], ours: BaseException | None, theirs: BaseException | None) -> bool:
        """Whether these are the errors of a case with these fields."""
        pairs = ((self.ours, ours), (self.theirs, theirs))
        is_so = all(
            error is None if words is None else error is not None and words in str(error) for words, error in pairs
        )
        return is_so and any(name in fields for name in self.fields)


CALLBACK = ("callback",)
NO_CONFIG = "has no attribute 'config'"
NO_CHECKPOINTING = "has no attribute 'gradient_checkpointing_enable'"
BEST = ("best", "metric_for_best_model")
NOT_FOUND = "training argument is set to"
ENDS = (
    Ends(NOISE, "neftune_noise_alpha=", "has no attribute 'get_input_embeddings'", ("neftune_noise_alpha",)),
    Ends(TWO_MODELS, "optimizers=", "Passing a `model_init` is incompatible", ("model_init",)),
    Ends(STOPPING, "EarlyStoppingCallback watches metric_for_best_model", "requires metric_for_best_model", CALLBACK),
    Ends(STOPPING, "EarlyStoppingCallback watches metric_for_best_model", "no attribute 'startswith'", CALLBACK),
    Ends(STOPPING, "EarlyStoppingCallback needs evaluations", "requires IntervalStrategy of steps or epoch", CALLBACK),
    Ends(METRIC, "names none of the evaluation sets", NOT_FOUND, BEST),
    Ends(METRIC, "is not computed: there is no compute_metrics", NOT_FOUND, BEST),
    Ends(METRIC, "is not computed: there is no compute_metrics", None, BEST),  # no evaluation was due
    Ends(INPUTS, None, "'input_ids'", ("include_for_metrics",)),
    Ends(NO_STATE, "has no optimizer.pt", None, ("save_only_model",)),
)
# Errors of the original, and the row of the table without which both sides are compared instead.
TRAINS_ONLY_HERE = (
    (MORE_MODULES, NO_CONFIG, "label_smoothing_factor"),
    (MORE_MODULES, NO_CHECKPOINTING, "checkpointing"),
    (SEQ2SEQ, "unexpected keyword argument 'optimizer_cls_and_kwargs'", "optimizers"),
)
FILES_OF_OURS = ("training_args.json", "manifest.json", "data_position.pth", "journal.jsonl")
# Settings of ours that ask for the original's arithmetic where the default corrects it.
AS_THERE = {"loss_weighting": "original", "on_nonfinite": "ignore"}
# All of them at once.
REPRODUCE = {"reproduce": "transformers"}


# -- the original, corrected ------------------------------------------------------------------------------------------


class Differs:
    """Mixed into a trainer of the original: does what docs/migrate.md says that ours does, with `reproduce` too."""

    used: Counter[Correction]

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        named = self.args.resume_from_checkpoint
        if resume_from_checkpoint is None and named is not None:
            self.used[NAMED_RESUME] += 1
        return super().train(named if resume_from_checkpoint is None else resume_from_checkpoint, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        skip = transformers.trainer.skip_first_batches
        transformers.trainer.skip_first_batches = functools.partial(self._skip_in_order, skip)
        try:
            return super()._run_epoch(*args, **kwargs)
        finally:
            transformers.trainer.skip_first_batches = skip

    def _load_callback_state(self) -> None:
        before = [type(callback) for callback in self.callback_handler.callbacks]
        super()._load_callback_state()
        callbacks = self.callback_handler.callbacks
        callbacks.sort(key=lambda one: before.index(type(one)) if type(one) in before else len(before))
        self.used[IN_PLACE] += any(self.state.stateful_callbacks) and self.args.restore_callback_states_from_checkpoint

    def _skip_in_order(self, skip: Any, loader: Any, num_batches: int = 0) -> Any:
        """Skips batches with a sampler that `set_epoch` finds."""
        rest = skip(loader, num_batches)
        if isinstance(rest, DataLoaderDispatcher) and isinstance(rest.batch_sampler, SkipBatchSampler):
            rest.batch_sampler.sampler = rest.batch_sampler.batch_sampler.sampler
            self.used[DISPATCHED] += 1
        return rest

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, num_epochs: int, *args: Any) -> Any:
        start = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, *args)
        if self.state.num_train_epochs == sys.maxsize and has_length(self.train_dataset):
            self.state.num_train_epochs = max_steps
            self.used[NO_BATCH] += 1
        return start

    def _load_from_checkpoint(self, checkpoint: Any, model: Any = None) -> None:
        super()._load_from_checkpoint(checkpoint, model)
        self._load_renamed(Path(checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_renamed(Path(self.state.best_model_checkpoint))

    def _load_renamed(self, checkpoint: Path) -> None:
        file = checkpoint / "model.safetensors"
        if not isinstance(self.model, transformers.PreTrainedModel) or not file.is_file():
            return
        if safetensors.torch.load_file(file).keys() - self.model.state_dict().keys():
            self.model.load_state_dict(type(self.model).from_pretrained(checkpoint).state_dict())
            self.used[RENAMED] += 1

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        before = self.control.should_training_stop
        metrics = super().evaluate(*args, **kwargs)
        if not self.is_in_train and self.control.should_training_stop != before:
            self.control.should_training_stop = before
            self.used[AFTERWARDS] += 1
        return metrics

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._token_rate():
            result = super()._finalize_training(*args, **kwargs)
        if "total_flos" not in result.metrics:
            result.metrics["total_flos"] = self.state.total_flos
            self.used[TOTAL_FLOS] += 1
        return result

    @contextlib.contextmanager
    def _token_rate(self) -> Iterator[None]:
        measure = transformers.trainer.speed_metrics
        counts = self.args.include_num_input_tokens_seen != "no"
        self.used[TOKEN_RATE] += counts
        transformers.trainer.speed_metrics = functools.partial(measure, num_tokens=1) if counts else measure
        try:
            yield
        finally:
            transformers.trainer.speed_metrics = measure

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        for name in [name for name in output.metrics if name.endswith("_model_preparation_time")]:
            del output.metrics[name]
            self.used[PREPARATION] += 1
        return output


class Corrected(Differs):
    """With the corrections of numbers too, which `reproduce="transformers"` takes back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = getattr(self.model, "config", None)
        if type(self.model).__name__ == "GPT2LMHeadModel" and config is not None and not self._loss_shifts_labels:
            self._loss_shifts_labels = True
            self.used[SHIFTED] += 1

        if self.compute_metrics is not None and "loss" in self.args.include_for_metrics:
            self.compute_metrics = self._with_a_loss_each(self.compute_metrics)

    def _with_a_loss_each(self, metrics: Any) -> Any:
        def trimmed(prediction: Any, **kwargs: Any) -> Any:
            labels = prediction.label_ids
            losses = prediction.losses
            if isinstance(losses, (np.ndarray, torch.Tensor)) and len(losses) > len(labels):
                prediction.losses = losses[: len(labels)]
                self.used[NUM_LOSSES] += 1
            return metrics(prediction, **kwargs)

        return trimmed

    def _get_eval_sampler(self, dataset: Any) -> Any:
        sampler = super()._get_eval_sampler(dataset)
        if sampler is None or isinstance(sampler, torch.utils.data.SequentialSampler):
            return sampler
        self.used[IN_ORDER] += 1
        return torch.utils.data.SequentialSampler(dataset)

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        given = getattr(self.args, "generation_config", None)
        if given is not None:
            model.generation_config = self.load_generation_config(given)
            self.used[GENERATION] += 1
        config = getattr(model, "config", None)
        if config is not None:
            self.used[CACHE] += getattr(config, "use_cache", None) != self.args.use_cache
            config.use_cache = self.args.use_cache
        return model

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, num_epochs: int, *args: Any) -> Any:
        start = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, *args)
        before = dict(vars(self.state))
        self.state.compute_steps(self.args, max_steps)
        self.used[INTERVALS] += vars(self.state) != before
        if self.state.global_step < max_steps or start[0] >= num_epochs:
            return start
        self.used[FINISHED] += 1
        return num_epochs, 0

    def _evaluate(self, trial: Any, ignore_keys: Any, skip_scheduler: bool = False) -> Any:
        if skip_scheduler and self.state.global_step > 0:  # only the evaluation of `eval_on_start` skips the scheduler
            self.used[START] += 1
            return None
        return super()._evaluate(trial, ignore_keys, skip_scheduler)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_evaluation():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_evaluation():
            return super().get_test_dataloader(*args, **kwargs)

    @contextlib.contextmanager
    def _whole_evaluation(self) -> Iterator[None]:
        asked = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = False
        self.used[WHOLE_EVALUATION] += asked
        try:
            yield
        finally:
            self.args.dataloader_drop_last = asked

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_draws(), self._in_half():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_draws(), self._in_half():
            return super().predict(*args, **kwargs)

    @contextlib.contextmanager
    def _in_half(self) -> Iterator[None]:
        is_half = not self.is_in_train and (self.args.bf16_full_eval or self.args.fp16_full_eval)
        whole = copy.deepcopy(self.model.state_dict()) if is_half else {}
        try:
            yield
        finally:
            if is_half:
                self.used[HALF_AFTER] += 1
                self.model.float().load_state_dict(whole)

    @contextlib.contextmanager
    def _without_draws(self) -> Iterator[None]:
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            yield
        finally:
            if not torch.equal(before[0], torch.get_rng_state()):
                self.used[EVAL_DRAWS] += 1
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.get("labels")
        num_rows = len(next(iter(inputs.values())))
        step = super().prediction_step(model, inputs, *args, **kwargs)
        if step[0] is not None:
            items = num_rows
            if isinstance(labels, torch.Tensor) and not labels.is_floating_point() and "labels" in self.label_names:
                items = int((labels[..., 1:] if self._loss_shifts_labels else labels).ne(-100).sum())
            self._losses.append((step[0].double().item(), items))
        return step

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._losses: list[tuple[float, int]] = []
        output = super().evaluation_loop(*args, **kwargs)
        losses = [one for one in self._losses if math.isfinite(one[0])] if self.args.logging_nan_inf_filter else []
        losses = losses or self._losses
        num_items = sum(items for _, items in losses)
        for name in [name for name in output.metrics if name.endswith("_loss")] if num_items else []:
            theirs = output.metrics[name]
            output.metrics[name] = sum(loss * n for loss, n in losses) / num_items
            self.used[EVAL_LOSS] += not math.isclose(theirs, output.metrics[name], rel_tol=1e-6)
        return output


def corrected(kind: type[transformers.Trainer], *, reproduces: bool = False) -> Any:
    mixin = Differs if reproduces else Corrected
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})
