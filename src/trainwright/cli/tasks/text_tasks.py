"""Tasks over text: a label or a number for it, a tag for each word (at its first token), and language models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorForTokenClassification

from trainwright._types import IGNORE_INDEX, JSONObject
from trainwright.cli.tasks.labels import find_labels
from trainwright.cli.tasks.models import max_length
from trainwright.cli.tasks.source import TaskSource, texts
from trainwright.cli.tasks.task_metrics import (
    Scorer,
    accuracy_and_f1,
    best_guess,
    exact_match,
    guessed_tokens,
    of_numbers,
    of_spans,
)
from trainwright.cli.tasks.task_objects import Columns, TaskObjects, pieces, shown, text_objects, text_parts
from trainwright.config.arguments import Seq2SeqTrainingArguments, TrainingArguments


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
    tokenizer, config, length = text_parts(material, args, roles, **settings)
    names = [material.recipe.column(role) for role in roles]
    label_column = material.recipe.column("label")

    def encode(columns: Columns) -> Columns:
        found = tokenizer(*(texts(columns[name]) for name in names), truncation=True, max_length=length)
        return {**found, "labels": [label(cell) for cell in columns[label_column]]}

    if config.pad_token_id is None:  # such a model takes the last token that is no padding for its answer
        config.pad_token_id = tokenizer.pad_token_id
    return text_objects(material, config, tokenizer, encode, compute_metrics=scores, about=about)


def _number(material: TaskSource, cell: Any) -> float:
    try:
        number = float(cell)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        column = material.recipe.column("label")
        material.wrong(f"{cell!r} in the column {column!r} is no number.", "data", "columns", "label")
    return number


def tagging(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a token classification."""
    _check_lengths(material)
    labels = find_labels(material, "tags")
    tokenizer, config, length = text_parts(material, args, ["words"], **labels.for_config)
    if not tokenizer.is_fast:
        material.wrong(
            "this tokenizer cannot say which word a token is of; a fast one is needed.", "model", "tokenizer"
        )
    words, tags = (material.recipe.column(role) for role in ("words", "tags"))

    def encode(columns: Columns) -> Columns:
        rows = [[str(word) for word in row] for row in columns[words]]
        found = tokenizer(rows, is_split_into_words=True, truncation=True, max_length=length)
        of_rows = []
        for number, row in enumerate(columns[tags]):
            word_of = found.word_ids(number)
            is_first = [word is not None and (at == 0 or word_of[at - 1] != word) for at, word in enumerate(word_of)]
            of_rows.append([labels.of(row[word]) if first else IGNORE_INDEX
                            for word, first in zip(word_of, is_first, strict=True)])  # fmt: skip
        return {**found, "labels": of_rows}

    return text_objects(
        material,
        config,
        tokenizer,
        encode,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=of_spans(labels.names),
        preprocess_logits=best_guess,
        about=f"tags: {shown(labels.names)}",
    )


def _check_lengths(material: TaskSource) -> None:
    for _, rows in material.parts:
        for words, tags in zip(material.column(rows, "words"), material.column(rows, "tags"), strict=True):
            if not isinstance(words, (list, tuple)) or not isinstance(tags, (list, tuple)):
                material.wrong("words and tags must be lists; these are not.", "data", "columns")
            if len(words) != len(tags):
                said = f"{len(words)} words with {len(tags)} tags: {' '.join(map(str, words[:8]))} ..."
                material.wrong(f"a row has {said}", "data", "columns")


def causal(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a causal model: samples are texts with an end token; long texts are several samples."""
    tokenizer, config, length = text_parts(material, args, ["text"])
    column, end = material.recipe.column("text"), [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def encode(columns: Columns) -> Columns:
        rows = tokenizer(texts(columns[column]), add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [piece for row in rows for piece in pieces([*row, *end], length)]}

    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    about = f"{len(tokenizer)} tokens in the vocabulary"
    return text_objects(material, config, tokenizer, encode, data_collator=collator, about=about)


def masked(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a masked model: tokens are hidden again whenever a sample is read."""
    tokenizer, config, length = text_parts(material, args, ["text"])
    if tokenizer.mask_token is None:
        material.wrong("this tokenizer has no token that hides another (mask_token).", "model", "tokenizer")
    column = material.recipe.column("text")

    def encode(columns: Columns) -> Columns:
        found = tokenizer(texts(columns[column]), truncation=True, max_length=length, return_overflowing_tokens=True)
        return {name: list(found[name]) for name in ("input_ids", "attention_mask")}

    return text_objects(
        material,
        config,
        tokenizer,
        encode,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=material.recipe.data.mask_share),
        compute_metrics=guessed_tokens,
        preprocess_logits=best_guess,
        about=f"{len(tokenizer)} tokens in the vocabulary",
    )


def translation(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a translation, or any text from a text."""
    tokenizer, config, source_length = text_parts(material, args, ["source", "target"], begins=False)
    target_length = max_length(material, tokenizer, config, name="max_target_length")
    source, target = (material.recipe.column(role) for role in ("source", "target"))

    def encode(columns: Columns) -> Columns:
        found = tokenizer(texts(columns[source]), truncation=True, max_length=source_length)
        labels = tokenizer(text_target=texts(columns[target]), truncation=True, max_length=target_length)["input_ids"]
        return {**{name: found[name] for name in ("input_ids", "attention_mask")}, "labels": labels}

    scores = exact_match(tokenizer) if cast(Seq2SeqTrainingArguments, args).predict_with_generate else None
    about = f"{len(tokenizer)} tokens in the vocabulary"
    objects = text_objects(material, config, tokenizer, encode, compute_metrics=scores, about=about)
    return replace(objects, data_collator=DataCollatorForSeq2Seq(tokenizer, model=objects.model))
