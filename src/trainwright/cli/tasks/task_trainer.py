"""The trainer of a task, from the objects that the task makes of rows: for a run, or to evaluate a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedTokenizerBase

from trainwright._types import JSONObject
from trainwright.cli.recipe.recipe_reader import arguments_class
from trainwright.cli.recipe.schema import Recipe
from trainwright.cli.tasks import pair_trainers, pairs, task_builders, task_metrics
from trainwright.cli.tasks.adapter import make_lora_config
from trainwright.cli.tasks.models import quiet_transformers
from trainwright.cli.tasks.source import TaskSource
from trainwright.cli.tasks.task_objects import TaskObjects
from trainwright.config.arguments import TrainingArguments

if TYPE_CHECKING:
    from trainwright.trainer import Trainer


def make_objects(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Loads the model of a task and encodes its rows; RecipeError if they do not fit."""
    home = pairs if material.recipe.spec.is_paired else task_builders
    build: Callable[..., TaskObjects] = getattr(home, material.recipe.task.replace("-", "_"))
    further = task_metrics.find_metrics(material.recipe.metrics)
    with quiet_transformers():
        parts = build(material, args)
    own = [] if parts.compute_metrics is None else [parts.compute_metrics]
    scorer = task_metrics.join_scorers([*own, *further])
    writes = material.recipe.spec.generates
    if writes and scorer is not None and isinstance(parts.processing_class, PreTrainedTokenizerBase):
        scorer = task_metrics.with_texts(parts.processing_class, scorer)
    preprocess = parts.preprocess_logits
    if not own and further and not writes:
        # Logits of all tokens would not fit into memory.
        preprocess = task_metrics.best_guess
    return replace(parts, compute_metrics=scorer, preprocess_logits=preprocess)


def make_task_trainer(recipe: Recipe, args: TrainingArguments, parts: TaskObjects, **data_and_model: Any) -> Trainer:
    """Makes the trainer of a task.

    Args:
        recipe: says whether the task generates.
        args: the settings.
        parts: collator, metrics and tokenizer of the task.
        data_and_model: `model`, `train_dataset` and `eval_dataset`, as the constructor takes them.
    """
    from trainwright.seq2seq_trainer import Seq2SeqTrainer
    from trainwright.trainer import Trainer

    return (Seq2SeqTrainer if recipe.spec.generates else Trainer)(
        args=args,
        data_collator=parts.data_collator,
        processing_class=parts.processing_class,
        compute_metrics=parts.compute_metrics,
        compute_loss_func=parts.compute_loss,
        preprocess_logits_for_metrics=parts.preprocess_logits,
        **data_and_model,
    )


def make_arguments(recipe: Recipe, training: JSONObject) -> TrainingArguments:
    """Returns the arguments of a task."""
    if recipe.spec.is_paired:
        return pair_trainers.make_arguments(recipe, training)
    return arguments_class(generates=recipe.spec.generates)(**training)


def make_named_pair_trainer(material: TaskSource, args: TrainingArguments, parts: TaskObjects) -> Trainer:
    """Makes the trainer of pairs; its samples have the names of their rows."""
    is_adapted = material.recipe.lora is not None
    adapter = make_lora_config(parts.model, material) if is_adapted else None
    with quiet_datasets():
        trainer = pair_trainers.make_pair_trainer(
            material.recipe, args, parts, adapter=adapter, train_dataset=parts.train, eval_dataset=parts.eval
        )
    length = cast(Any, args).max_length
    keeps_end = getattr(args, "truncation_mode", None) == "keep_end"
    for name, part in (("train_dataset", "train"), ("eval_dataset", "eval" if len(material.eval) else "train")):
        found = getattr(trainer, name)
        if found is not None:
            setattr(trainer, name, pairs.name_pairs(material, part, found, length=length, keeps_end=keeps_end))
    return trainer


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Turns off the progress bars of the package datasets."""
    from datasets.utils import logging as datasets_logging

    logs: Any = datasets_logging
    had_bars = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logs.enable_progress_bar()


def make_evaluator(material: TaskSource, args: TrainingArguments) -> tuple[TaskObjects, Trainer]:
    """Returns the objects of rows, and a trainer that evaluates a model on them; the caller shows the metrics."""
    from trainwright.callbacks.progress import PrinterCallback

    parts = make_objects(material, args)
    if material.recipe.spec.is_paired:
        trainer = make_named_pair_trainer(material, args, replace(parts, eval=parts.train))
        trainer.remove_callback(PrinterCallback)
        return replace(parts, train=trainer.eval_dataset), trainer
    trainer = make_task_trainer(material.recipe, args, parts, model=parts.model, eval_dataset=parts.train)
    trainer.remove_callback(PrinterCallback)
    return parts, trainer
