"""Fine-tune MiniLM to find the names in tweets: people, places, companies and seven kinds more.

Most words are no name at all, so accuracy says little; the score is the F1 over whole names, type included.

    python examples/token_classification.py --num_train_epochs 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from _common import held_out, minilm, train_and_evaluate, tweets
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedTokenizerBase

from trainwright import (
    DataCollatorForTokenClassification,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

DEMO_SETTINGS = {
    "output_dir": "runs/token_classification",
    "num_train_epochs": 2,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 64,
    "learning_rate": 3e-4,
    "warmup_steps": 0.1,
    "logging_steps": 0.25,
    "save_strategy": "epoch",
    "save_total_limit": 1,
}
Span = tuple[int, int, str]


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Default: MiniLM, a data package."})
    max_length: int = field(default=64, metadata={"help": "Tokens per tweet; longer tweets are cut off."})
    max_train_samples: int = field(default=2000, metadata={"help": "Train on this many tweets at most."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    rows = tweets()
    tags = sorted({tag for _, row in rows for tag in row})
    train_rows, eval_rows = held_out(rows, num_train=model_args.max_train_samples, num_eval=390)
    path = model_args.model_name_or_path or minilm()
    tokenizer = AutoTokenizer.from_pretrained(path)
    names = {"id2label": dict(enumerate(tags)), "label2id": {tag: i for i, tag in enumerate(tags)}}
    trainer = Trainer(
        model=AutoModelForTokenClassification.from_pretrained(path, **names),
        args=args,
        train_dataset=encode(train_rows, tags, tokenizer, model_args.max_length),
        eval_dataset=encode(eval_rows, tags, tokenizer, model_args.max_length),
        data_collator=DataCollatorForTokenClassification(tokenizer),
        processing_class=tokenizer,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),  # all that the score needs
        compute_metrics=partial(span_scores, tags=tags),
    )
    train_and_evaluate(trainer, "f1", "precision", "recall")


def encode(
    rows: Sequence[tuple[list[str], list[str]]], tags: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[dict[str, list[int]]]:
    """A word's tag is the label of its first token; its further tokens have none (-100)."""
    encoded = tokenizer([words for words, _ in rows], is_split_into_words=True, truncation=True, max_length=max_length)
    features = []
    for i, (_, row_tags) in enumerate(rows):
        word_of = encoded.word_ids(i)
        starts = [word is not None and (at == 0 or word_of[at - 1] != word) for at, word in enumerate(word_of)]
        labels = [tags.index(row_tags[w]) if is_start else -100 for w, is_start in zip(word_of, starts, strict=True)]
        features.append(
            {"input_ids": encoded["input_ids"][i], "attention_mask": encoded["attention_mask"][i], "labels": labels}
        )
    return features


def spans(tags: Sequence[str]) -> set[Span]:
    """The names in a row of tags: first word, word after the last, type."""
    found: set[Span] = set()
    start = 0
    kind = ""
    for at, tag in enumerate([*tags, "O"]):
        if kind and tag != f"I-{kind}":
            found.add((start, at, kind))
            kind = ""
        if tag.startswith("B-") or (tag.startswith("I-") and not kind):
            start = at
            kind = tag[2:]
    return found


def span_scores(prediction: EvalPrediction, tags: list[str]) -> dict[str, float]:
    """Precision, recall and F1 over whole names of the right type."""
    hits = num_found = num_true = 0
    for predicted, labels in zip(prediction.predictions, prediction.label_ids, strict=True):
        counts = labels != -100
        found, true = (spans([tags[i] for i in np.asarray(ids)[counts]]) for ids in (predicted, labels))
        hits = hits + len(found & true)
        num_found = num_found + len(found)
        num_true = num_true + len(true)
    precision = hits / max(num_found, 1)
    recall = hits / max(num_true, 1)
    return {"precision": precision, "recall": recall, "f1": 2 * hits / max(num_found + num_true, 1)}


if __name__ == "__main__":
    main()
