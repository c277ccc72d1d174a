"""Train a plain nn.Module, which knows nothing of transformers, to tell how pleasant a word is.

The data are 7,200 words with the mean judgement of ten people, from -4 to 4 (VADER's lexicon). MiniLM turns each word
into a vector, once; a network of two layers learns the judgement. The score is Pearson's correlation.

    python examples/regression_plain_module.py --learning_rate 1e-3
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from _common import held_out, minilm, package_directory, train_and_evaluate
from torch import nn
from transformers import AutoModel, AutoTokenizer

from trainwright import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed

DEMO_SETTINGS = {
    "output_dir": "runs/regression",
    "num_train_epochs": 8,
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 256,
    "learning_rate": 2e-3,
    "logging_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
}


@dataclass
class ModelArguments:
    hidden_size: int = field(default=128, metadata={"help": "Width of the network."})
    dropout: float = field(default=0.2, metadata={"help": "Share of the values that are dropped in training."})
    max_words: int = field(default=7000, metadata={"help": "Words to use at most; a seventh is held out."})


class Judge(nn.Module):
    """All that a Trainer asks of a model: with labels, a dict with the loss; what else is in it are predictions."""

    def __init__(self, num_features: int, args: ModelArguments) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(num_features, args.hidden_size),
            nn.GELU(),
            nn.Dropout(args.dropout),
            nn.Linear(args.hidden_size, 1),
        )

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        judged = self.network(features).squeeze(-1)
        return (
            {"judged": judged} if labels is None else {"loss": nn.functional.mse_loss(judged, labels), "judged": judged}
        )


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    words = judged_words()[: model_args.max_words]
    vectors = embed([word for word, _ in words])
    values = torch.tensor([value for _, value in words])
    rows = [{"features": vector, "labels": value} for vector, value in zip(vectors, values, strict=True)]
    train_rows, eval_rows = held_out(rows, num_train=len(rows), num_eval=len(rows) // 7)
    trainer = Trainer(
        model=Judge(vectors.shape[1], model_args),
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        compute_metrics=pearson,
    )
    train_and_evaluate(trainer, "pearson", "loss")


def judged_words() -> list[tuple[str, float]]:
    """Words (and a few smileys) with their mean judgement."""
    path = package_directory("vaderSentiment") / "vader_lexicon.txt"
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return [(row[0], float(row[1])) for row in rows if row[0].isalpha()]


@torch.no_grad()
def embed(words: list[str], batch_size: int = 256) -> torch.Tensor:
    """The mean of MiniLM's last layer over the tokens of each word."""
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    model = AutoModel.from_pretrained(minilm()).eval()
    parts = []
    for start in range(0, len(words), batch_size):
        batch = tokenizer(words[start : start + batch_size], padding=True, return_tensors="pt")
        mask = batch["attention_mask"].unsqueeze(-1)
        parts.append((model(**batch).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1))
    return torch.cat(parts)


def pearson(prediction: EvalPrediction) -> dict[str, float]:
    return {"pearson": float(np.corrcoef(prediction.predictions, prediction.label_ids)[0, 1])}


if __name__ == "__main__":
    main()
