"""One label, or one number, for a text or a pair of texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trainwright._types import JSONObject
from trainwright.cli.tasks.encoding import Columns, encoded
from trainwright.cli.tasks.labels import find_labels
from trainwright.cli.tasks.models import load_config, load_model
from trainwright.cli.tasks.source import TaskSource, texts
from trainwright.cli.tasks.task_metrics import Scorer, accuracy_and_f1, of_numbers
from trainwright.cli.tasks.task_objects import TaskObjects, shown
from trainwright.cli.tasks.tokenizers import load_tokenizer, max_length
from trainwright.config.arguments import TrainingArguments


def classification(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a text classification."""
    labels = find_labels(material, "label")
    settings = {**labels.for_config, "problem_type": "single_label_classification"}
    return _parts(material, args, settings, labels.of, accuracy_and_f1, f"labels: {shown(labels.names)}")


def regression(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a regression."""
    numbers = [_number(material, cell) for _, rows in material.parts for cell in material.column(rows, "label")]
    about = f"numbers from {min(numbers):g} to {max(numbers):g}"
    settings = {"num_labels": 1, "problem_type": "regression"}
    return _parts(material, args, settings, float, of_numbers, about)


def _parts(
    material: TaskSource,
    args: TrainingArguments,
    settings: JSONObject,
    label: Callable[[Any], float],
    scores: Scorer,
    about: str,
) -> TaskObjects:
    roles = ["text", *(["text_pair"] if material.has("text_pair") else [])]
    tokenizer = load_tokenizer(material, args, roles)
    config = load_config(material, tokenizer, **settings)
    length = max_length(material, tokenizer, config)
    names = [material.recipe.column(role) for role in roles]
    label_column = material.recipe.column("label")

    def encode(columns: Columns) -> Columns:
        found = tokenizer(*(texts(columns[name]) for name in names), truncation=True, max_length=length)
        return {**found, "labels": [label(cell) for cell in columns[label_column]]}

    if config.pad_token_id is None:  # such a model takes the last token that is no padding for its answer
        config.pad_token_id = tokenizer.pad_token_id
    return TaskObjects(
        model=load_model(material, config),
        train=encoded(material.train, encode),
        eval=encoded(material.eval, encode) if len(material.eval) else None,
        processing_class=tokenizer,
        compute_metrics=scores,
        about=about,
    )


def _number(material: TaskSource, cell: Any) -> float:
    try:
        number = float(cell)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        column = material.recipe.column("label")
        material.wrong(f"{cell!r} in the column {column!r} is no number.", "data", "columns", "label")
    return number
