"""Language models: causal ones continue a text, masked ones fill in hidden words, others write a text from a text."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq

from trainwright.cli.tasks.models import max_length
from trainwright.cli.tasks.source import TaskSource, texts
from trainwright.cli.tasks.task_metrics import best_guess, exact_match, guessed_tokens
from trainwright.cli.tasks.task_objects import Columns, TaskObjects, pieces, text_objects, text_parts
from trainwright.config.arguments import Seq2SeqTrainingArguments, TrainingArguments


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
