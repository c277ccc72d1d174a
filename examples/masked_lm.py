"""Teach MiniLM to fill in words that were taken out of Python's documentation: the docstrings of its standard library.

MiniLM arrives without the head that guesses words; its word vectors, which the head shares, are what it starts from.
The score is the share of hidden words that are guessed.

    python examples/masked_lm.py --mlm_probability 0.3
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from _common import docstrings, held_out, minilm, train_and_evaluate
from transformers import AutoModelForMaskedLM, AutoTokenizer

from trainwright import (
    DataCollatorForLanguageModeling,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

DEMO_SETTINGS = {
    "output_dir": "runs/masked_lm",
    "max_steps": 60,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "learning_rate": 1e-3,
    "warmup_steps": 6,
    "logging_steps": 20,
    "save_steps": 30,
    "save_total_limit": 1,
    "train_sampling_strategy": "group_by_length",
}


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Default: MiniLM, a data package."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens that are hidden."})
    max_length: int = field(default=48, metadata={"help": "Tokens per docstring; longer docstrings are cut off."})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    path = model_args.model_name_or_path or minilm()
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = sorted({doc.text for doc in docstrings()})
    encoded = tokenizer(texts, truncation=True, max_length=model_args.max_length, return_special_tokens_mask=True)
    rows = [{name: values[i] for name, values in encoded.items()} for i in range(len(texts))]
    train_rows, eval_rows = held_out(rows, num_train=len(rows), num_eval=200)
    args.remove_unused_columns = False  # the collator reads special_tokens_mask, and the model does not
    trainer = Trainer(
        model=AutoModelForMaskedLM.from_pretrained(path),
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=model_args.mlm_probability),
        processing_class=tokenizer,
        preprocess_logits_for_metrics=best_guess,
        compute_metrics=guessed,
    )
    train_and_evaluate(trainer, "guessed", "loss")


def best_guess(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of 30,522 numbers for each token, the one that the score needs."""
    return logits.argmax(dim=-1)


def guessed(prediction: EvalPrediction) -> dict[str, float]:
    hidden = prediction.label_ids != -100
    return {"guessed": float((prediction.predictions == prediction.label_ids)[hidden].mean())}


if __name__ == "__main__":
    main()
