"""A text from a text, by an encoder and a decoder; evaluation lets the model write."""

from __future__ import annotations

from typing import cast

from trainwright.cli.tasks.encoding import Columns, encoded
from trainwright.cli.tasks.models import load_config, load_model
from trainwright.cli.tasks.source import TaskSource, texts
from trainwright.cli.tasks.task_metrics import exact_match
from trainwright.cli.tasks.task_objects import TaskObjects
from trainwright.cli.tasks.tokenizers import load_tokenizer, max_length
from trainwright.config.arguments import TrainingArguments


def translation(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a translation, or any text from a text."""
    from transformers import DataCollatorForSeq2Seq

    from trainwright.config.seq2seq import Seq2SeqTrainingArguments

    tokenizer = load_tokenizer(material, args, ["source", "target"], begins=False)
    config = load_config(material, tokenizer)
    source_length = max_length(material, tokenizer, config)
    target_length = max_length(material, tokenizer, config, name="max_target_length")
    source, target = (material.recipe.column(role) for role in ("source", "target"))

    def encode(columns: Columns) -> Columns:
        found = tokenizer(texts(columns[source]), truncation=True, max_length=source_length)
        labels = tokenizer(text_target=texts(columns[target]), truncation=True, max_length=target_length)["input_ids"]
        return {**{name: found[name] for name in ("input_ids", "attention_mask")}, "labels": labels}

    model = load_model(material, config)
    return TaskObjects(
        model=model,
        train=encoded(material.train, encode),
        eval=encoded(material.eval, encode) if len(material.eval) else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=exact_match(tokenizer) if cast(Seq2SeqTrainingArguments, args).predict_with_generate else None,
        about=f"{len(tokenizer)} tokens in the vocabulary",
    )
