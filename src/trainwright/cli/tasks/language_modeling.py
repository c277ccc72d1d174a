"""Language models: causal ones continue a text, masked ones fill in hidden words."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from trainwright.cli.tasks.encoding import Columns, encoded, pieces
from trainwright.cli.tasks.models import load_config, load_model
from trainwright.cli.tasks.source import ModelConfig, TaskSource, texts
from trainwright.cli.tasks.task_metrics import Scorer, best_guess, guessed_tokens
from trainwright.cli.tasks.task_objects import TaskObjects
from trainwright.cli.tasks.tokenizers import load_tokenizer, max_length
from trainwright.config.arguments import TrainingArguments


def causal(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a causal model: samples are texts with an end token; long texts are several samples."""
    from transformers import DataCollatorForLanguageModeling

    tokenizer = load_tokenizer(material, args, ["text"])
    config = load_config(material, tokenizer)
    length = max_length(material, tokenizer, config)
    column, end = material.recipe.column("text"), [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def encode(columns: Columns) -> Columns:
        rows = tokenizer(texts(columns[column]), add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [piece for row in rows for piece in pieces([*row, *end], length)]}

    return _parts(material, config, encode, tokenizer, DataCollatorForLanguageModeling(tokenizer, mlm=False))


def masked(material: TaskSource, args: TrainingArguments) -> TaskObjects:
    """Makes the objects of a masked model: tokens are hidden again whenever a sample is read."""
    from transformers import DataCollatorForLanguageModeling

    tokenizer = load_tokenizer(material, args, ["text"])
    if tokenizer.mask_token is None:
        material.wrong("this tokenizer has no token that hides another (mask_token).", "model", "tokenizer")
    config = load_config(material, tokenizer)
    length = max_length(material, tokenizer, config)
    column = material.recipe.column("text")

    def encode(columns: Columns) -> Columns:
        found = tokenizer(texts(columns[column]), truncation=True, max_length=length, return_overflowing_tokens=True)
        return {name: list(found[name]) for name in ("input_ids", "attention_mask")}

    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=material.recipe.data.mask_share)
    return _parts(material, config, encode, tokenizer, collator, scores=guessed_tokens)


def _parts(
    material: TaskSource,
    config: ModelConfig,
    encode: Callable[[Columns], Columns],
    tokenizer: PreTrainedTokenizerBase,
    collator: Callable[..., object],
    scores: Scorer | None = None,
) -> TaskObjects:
    train = encoded(material.train, encode)
    held = encoded(material.eval, encode) if len(material.eval) else None
    if len(train) == 0:
        material.wrong("no text is left that has two tokens or more.", "data", "train")
    return TaskObjects(
        model=load_model(material, config),
        train=train,
        eval=held,
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=scores,
        preprocess_logits=None if scores is None else best_guess,
        about=f"{len(tokenizer)} tokens in the vocabulary",
    )
