"""Fine-tune MiniLM to choose: which of four functions of Python's standard library is this the documentation of?

Guessing gives an accuracy of 0.25.

    python examples/multiple_choice.py --num_choices 8
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from _common import Docstring, docstrings, held_out, minilm, train_and_evaluate
from transformers import AutoModelForMultipleChoice, AutoTokenizer, PreTrainedTokenizerBase

from trainwright import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed

DEMO_SETTINGS = {
    "output_dir": "runs/multiple_choice",
    "num_train_epochs": 1,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 32,
    "learning_rate": 2e-4,
    "warmup_steps": 0.1,
    "logging_steps": 0.25,
    "save_steps": 0.5,
    "save_total_limit": 1,
}


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Default: MiniLM, a data package."})
    num_choices: int = field(default=4, metadata={"help": "Functions to choose from."})
    max_length: int = field(default=40, metadata={"help": "Tokens of a docstring with a name; the rest is cut off."})
    max_train_samples: int = field(default=600, metadata={"help": "Train on this many docstrings at most."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    path = model_args.model_name_or_path or minilm()
    tokenizer = AutoTokenizer.from_pretrained(path)
    train_docs, eval_docs = held_out(public_functions(), num_train=model_args.max_train_samples, num_eval=200)
    trainer = Trainer(
        model=AutoModelForMultipleChoice.from_pretrained(path),
        args=args,
        train_dataset=encode(train_docs, tokenizer, model_args),
        eval_dataset=encode(eval_docs, tokenizer, model_args),
        data_collator=PadChoices(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    train_and_evaluate(trainer, "accuracy", "loss")


def public_functions() -> list[Docstring]:
    """Docstrings of at least five words, without a leading signature; of two with one text the first."""
    by_text = {doc.text: doc for doc in docstrings() if len(doc.text.split()) >= 5 and "._" not in doc.name}
    return list(by_text.values())


def spoken(name: str) -> str:
    """`textwrap.fill_paragraph` -> `textwrap fill paragraph`, as words that the tokenizer knows."""
    return re.sub(r"[._]|(?<=[a-z])(?=[A-Z])", " ", name)


def encode(docs: Sequence[Docstring], tokenizer: PreTrainedTokenizerBase, args: ModelArguments) -> list[dict[str, Any]]:
    """The docstring beside each of the names; the right one at a place that the seed draws."""
    draw = random.Random(0)
    rows = []
    for doc in docs:
        others = draw.sample([other.name for other in docs if other.name != doc.name], k=args.num_choices - 1)
        right = draw.randrange(args.num_choices)
        names = [spoken(name) for name in [*others[:right], doc.name, *others[right:]]]
        pairs = tokenizer([doc.text] * len(names), names, truncation="only_first", max_length=args.max_length)
        rows.append({**pairs, "labels": right})
    return rows


class PadChoices:
    """Pads the rows of all choices to one length: a batch is samples x choices x tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        names = [name for name in samples[0] if name != "labels"]
        num_choices = len(samples[0]["input_ids"])
        flat = [{name: sample[name][i] for name in names} for sample in samples for i in range(num_choices)]
        batch = self.tokenizer.pad(flat, return_tensors="pt")
        shaped = {name: tensor.view(len(samples), num_choices, -1) for name, tensor in batch.items()}
        return {**shaped, "labels": torch.tensor([sample["labels"] for sample in samples])}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


if __name__ == "__main__":
    main()
