"""A Trainer from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainwright.cli.recipe.schema import Recipe
from trainwright.cli.recipe.training_section import make_arguments
from trainwright.cli.recipe.yaml_tree import Tree
from trainwright.cli.tasks.source import load
from trainwright.cli.tasks.task_objects import TaskObjects

if TYPE_CHECKING:
    from trainwright.trainer import Trainer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns off transformers' bars and reports of loading: a new head is expected."""
    from transformers.utils import logging as hf_logging

    logs: Any = hf_logging
    level, had_bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if had_bars:
            logs.enable_progress_bar()


def make_trainer(recipe: Recipe, tree: Tree, say: Callable[[str, str], None]) -> Trainer:
    """Reads the data, loads the model, and puts both into a trainer.

    Raises:
        RecipeError: data, model and settings do not fit; nothing was trained.
    """
    from trainwright.data.seeding import set_seed
    from trainwright.seq2seq_trainer import Seq2SeqTrainer
    from trainwright.trainer import Trainer

    args = make_arguments(recipe.training, generates=recipe.spec.generates)
    set_seed(args.seed)  # a new head is drawn at random
    material = load(recipe, tree)
    if not len(material.eval) and args.eval_strategy != "no":
        tree.refuse([(("training", "eval_strategy"), "training.eval_strategy: there are no rows to evaluate on. "
                      "Name them in data.eval, or set data.eval_share above 0.")])  # fmt: skip
    module, _, name = recipe.spec.builder.partition(".")
    build: Callable[..., TaskObjects] = getattr(import_module(f"trainwright.cli.tasks.{module}"), name)
    with quiet_transformers():
        parts = build(material, args)
    held = "" if parts.eval is None else f", {len(parts.eval)} to evaluate on"
    say("data", f"{len(parts.train)} samples to train on{held}, {parts.about}")
    weights = "from scratch" if recipe.model.from_scratch or recipe.model.path is None else f"from {recipe.model.path}"
    num = sum(parameter.numel() for parameter in parts.model.parameters())
    say("model", f"{type(parts.model).__name__} of {num / 1e6:.1f} million parameters, {weights}")
    return (Seq2SeqTrainer if recipe.spec.generates else Trainer)(
        model=parts.model,
        args=args,
        data_collator=parts.data_collator,
        train_dataset=parts.train,
        eval_dataset=parts.eval,
        processing_class=parts.processing_class,
        compute_metrics=parts.compute_metrics,
        preprocess_logits_for_metrics=parts.preprocess_logits,
    )
