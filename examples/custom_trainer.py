"""A trainer of one's own: a loss with class weights, an optimizer of one's own, and a callback that ends the run.

The task is to count the syllables of English words. Most words have two or three, few have six, so the plain loss
neglects the long ones; the score is the recall of each count, averaged.

    python examples/custom_trainer.py --good_enough 0.9
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _common import held_out, pronunciations, train_and_evaluate
from torch import nn

from trainwright import EvalPrediction, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, set_seed

DEMO_SETTINGS = {
    "output_dir": "runs/custom_trainer",
    "max_steps": 400,
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 256,
    "learning_rate": 3e-3,
    "logging_steps": 100,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "save_steps": 100,
    "save_total_limit": 1,
}
MOST = 6  # words of more syllables count as this many


@dataclass
class OwnArguments:
    good_enough: float = field(default=0.97, metadata={"help": "Training ends when the mean recall is this high."})
    decay: float = field(default=1e-2, metadata={"help": "Weight decay of the matrices."})


class Counting(nn.Module):
    """Reads the letters in both directions and guesses the count; it leaves the loss to the trainer."""

    def __init__(self, hidden_size: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(27, 32, padding_idx=0)
        self.reader = nn.GRU(32, hidden_size, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden_size, MOST)

    def forward(self, letters: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        states, _ = self.reader(self.letters(letters))
        states = states.masked_fill(letters.eq(0).unsqueeze(-1), -torch.inf)
        return {"logits": self.head(states.max(dim=1).values)}


class WeightedTrainer(Trainer):
    """Rare counts weigh more in the loss, and Nesterov's Adam updates the weights."""

    def __init__(self, *args: Any, class_weights: torch.Tensor, decay: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights
        self.decay = decay

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        weights = self.class_weights.to(outputs["logits"].device)
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], weight=weights)
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            parameters = [p for p in (self.model if model is None else model).parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.NAdam(groups, lr=self.args.learning_rate, decoupled_weight_decay=True)
        return self.optimizer


class StopWhenGoodEnough(TrainerCallback):
    """Ends the run when an evaluation reaches a score."""

    def __init__(self, name: str, value: float) -> None:
        self.name = name
        self.value = value

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if kwargs["metrics"].get(f"eval_{self.name}", 0.0) >= self.value and state.global_step > 0:
            control.should_training_stop = control.should_save = True


def main() -> None:
    parser = HfArgumentParser((OwnArguments, TrainingArguments))
    parser.set_defaults(**DEMO_SETTINGS)
    own, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    train_rows, eval_rows = held_out(words(), num_train=30_000, num_eval=3_000)
    trainer = WeightedTrainer(
        model=Counting(),
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        data_collator=pad,
        compute_metrics=mean_recall,
        callbacks=[StopWhenGoodEnough("mean_recall", own.good_enough)],
        class_weights=class_weights(train_rows),
        decay=own.decay,
    )
    train_and_evaluate(trainer, "mean_recall", "accuracy", "loss")


def words() -> list[dict[str, Any]]:
    """Letters as 1 to 26, and the number of syllables: of vowels among the phonemes, which end in their stress."""
    rows = ((word, sum(sound[-1].isdigit() for sound in sounds)) for word, sounds in pronunciations())
    return [
        {"letters": [ord(letter) - 96 for letter in word], "labels": min(count, MOST) - 1}
        for word, count in rows
        if count > 0 and word.islower()
    ]


def class_weights(rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    """The inverse square root of how often each count occurs, 1 on average over the words."""
    counts = Counter(row["labels"] for row in rows)
    weights = torch.tensor([max(counts[label], 1) for label in range(MOST)]).float().rsqrt()
    return weights * len(rows) / sum(counts[label] * float(weights[label]) for label in range(MOST))


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(sample["letters"]) for sample in samples]
    letters = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"letters": letters, "labels": torch.tensor([sample["labels"] for sample in samples])}


def mean_recall(prediction: EvalPrediction) -> dict[str, float]:
    """How many words of each count are found, averaged over the counts; and the share of all words."""
    is_right = prediction.predictions.argmax(axis=-1) == prediction.label_ids
    recalls = [is_right[prediction.label_ids == label].mean() for label in np.unique(prediction.label_ids)]
    return {"mean_recall": float(np.mean(recalls)), "accuracy": float(is_right.mean())}


if __name__ == "__main__":
    main()
