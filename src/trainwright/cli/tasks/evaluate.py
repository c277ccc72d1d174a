"""`trainwright eval`: the metrics of a trained model on other data, its confusion matrix, and its hardest rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from trainwright._types import IGNORE_INDEX, JSONObject
from trainwright.cli.tasks.applied import Applied, make_eval_arguments
from trainwright.cli.tasks.multi_label import PROBLEM_TYPE
from trainwright.cli.tasks.source import Row, TaskSource, load
from trainwright.cli.tasks.task_trainer import make_evaluator
from trainwright.errors import ArgumentError, RecipeError
from trainwright.support.model_facts import shifts_labels

LONGEST_TEXT = 200
OF_ANSWERS = ("label", "tags", "target")  # roles of columns that a prediction does without
OF_LABELS = ("text-classification", "image-classification", "token-classification")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of an evaluation.

    Attributes:
        task: task of the model.
        num_samples: samples that were evaluated.
        metrics: metrics by name, without a prefix.
        labels: names of the labels; empty if the task has none.
        confusion: number of samples (for tags: words) by correct label, then by predicted label; empty without labels.
        hardest: rows with the largest losses, largest first: name, loss, text, and correct and predicted label.
    """

    task: str
    num_samples: int
    metrics: dict[str, float]
    labels: list[str] = field(default_factory=list)
    confusion: list[list[int]] = field(default_factory=list)
    hardest: list[JSONObject] = field(default_factory=list)


def evaluate(one: Applied, *, num_hardest: int = 10) -> Evaluation:
    """Evaluates a trained model in the same way as its run.

    Args:
        one: the model and its data, which must have labels.
        num_hardest: number of rows in `hardest`; 0 skips the second pass over the data that finds them, and the matrix.

    Raises:
        RecipeError: the data do not fit the task of the model.
        ArgumentError: there is no model to compare a preference with.
    """
    part = one.recipe.preference
    if one.recipe.task == "preference" and (part is None or part.reference is None):
        raise ArgumentError(
            "A preference is evaluated against the model before training, and a model from scratch has none. Name one: "
            "--set preference.reference=PATH."
        )
    args = make_eval_arguments(one)
    material = _load_labelled(one)
    parts, trainer = make_evaluator(material, args)
    found = trainer.evaluate()
    metrics = {name.removeprefix("eval_"): value for name, value in found.items() if name != "epoch"}
    config: Any = parts.model.config  # each kind of model has its own class
    names = list(config.id2label.values()) if one.recipe.task in OF_LABELS else []
    if num_hardest == 0:
        return Evaluation(task=one.recipe.task, num_samples=len(parts.train), metrics=metrics, labels=names)
    if one.recipe.spec.is_paired:
        losses = _compute_pair_losses(trainer)
        confusion: Any = np.zeros((0, 0), dtype=np.int64)
        guesses: list[tuple[int, int]] = []
    else:
        # Rows with several labels have no single place in a matrix.
        num_classes = 0 if config.problem_type == PROBLEM_TYPE else len(names)
        losses, confusion, guesses = _second_pass(trainer, num_labels=num_classes)
    hardest = []
    for place in np.argsort(-losses, kind="stable")[:num_hardest].tolist():
        name = parts.train.origin.names[place]
        row: JSONObject = {"name": str(name), "loss": float(losses[place]), "text": _text(material, name)}
        if guesses:
            right, guessed = guesses[place]
            row |= {"right": names[right], "predicted": names[guessed]}
        hardest.append(row)
    return Evaluation(
        task=one.recipe.task,
        num_samples=len(parts.train),
        metrics=metrics,
        labels=names,
        confusion=confusion.tolist(),
        hardest=hardest,
    )


def _load_labelled(one: Applied) -> TaskSource:
    """Returns the rows; RecipeError for a file without labels names the command that needs none."""
    try:
        return load(one.recipe, one.tree, is_evaluation=True)
    except RecipeError as error:
        if not any(path[:2] == ("data", "columns") and path[-1] in OF_ANSWERS for path, _ in error.entries):
            raise
        said = f"{error}\nAn evaluation compares with labels; `trainwright predict` needs none."
        found = RecipeError(said)
        found.problems = error.problems
        found.entries = error.entries
        raise found from None


def _second_pass(trainer: Any, *, num_labels: int) -> tuple[np.ndarray[Any, Any], Any, list[tuple[int, int]]]:
    """Returns each sample's loss, the confusion matrix, and the (correct, predicted) labels of labelled samples."""
    model = trainer.model.eval()
    shifts = shifts_labels(model, declared_only=False)
    losses: list[float] = []
    guesses: list[tuple[int, int]] = []
    confusion = np.zeros((num_labels, num_labels), dtype=np.int64)
    for batch in trainer.get_eval_dataloader():
        inputs = trainer._prepare_inputs(batch)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            logits = model(**inputs).logits
        labels = inputs["labels"]
        losses += compute_sample_losses(logits, labels, shifts=shifts).tolist()
        if num_labels:
            guessed = logits.argmax(dim=-1)
            counts = labels != IGNORE_INDEX
            pairs = torch.stack([labels[counts], guessed[counts]], dim=1).tolist()
            for right, guess in pairs:
                confusion[right, guess] += 1
            guesses += [(right, guess) for right, guess in pairs] if labels.ndim == 1 else []
    return np.nan_to_num(np.asarray(losses), nan=np.inf), confusion, guesses


def _compute_pair_losses(trainer: Any) -> np.ndarray[Any, Any]:
    trainer.model.eval()
    losses: list[float] = []
    for batch in trainer.get_eval_dataloader():
        losses += trainer.pair_losses(trainer._prepare_inputs(batch)).tolist()
    found: np.ndarray[Any, Any] = np.nan_to_num(np.asarray(losses), nan=np.inf)
    return found


def compute_sample_losses(logits: torch.Tensor, labels: torch.Tensor, *, shifts: bool) -> torch.Tensor:
    """Returns the loss of each sample: the mean cross-entropy of its labels, or the squared error of a number.

    Args:
        logits: (batch, labels), (batch, tokens, labels), or (batch, 1) of numbers.
        labels: (batch), (batch, tokens), or (batch, labels) of 0 and 1; `IGNORE_INDEX` does not count.
        shifts: the label of a token is the next token.

    Returns:
        Shape (batch), fp32; 0 for a sample without a label.
    """
    logits = logits.float()
    if labels.is_floating_point() and labels.ndim == 2:
        return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)
    if labels.is_floating_point():
        return (logits.squeeze(-1) - labels) ** 2
    if labels.ndim == 1:
        return nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
    if shifts:
        logits = logits[:, :-1]
        labels = labels[:, 1:]
    each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORE_INDEX)
    return each.sum(dim=1) / (labels != IGNORE_INDEX).sum(dim=1).clamp(min=1)


def _text(material: TaskSource, name: Any) -> str:
    """Returns the beginning of a row's inputs."""
    row: Row = next((row for row in material.train if row.name.row == name.row and row.name.file == name.file), {})
    spec = material.recipe.spec
    columns = [material.recipe.column(role) for role in (*spec.needs, *spec.takes) if role not in ("label", "tags")]
    cells = [row[column] for column in columns if row.get(column) is not None]
    text = " | ".join(" ".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in cells)
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."
