"""A training that uploads all its checkpoints, to be killed: `python victim.py RUN STEPS`. HF_ENDPOINT has the Hub."""

from __future__ import annotations

import sys

import torch
from torch import nn

from trainwright import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


def main(folder: str, steps: str) -> None:
    items = [{"x": torch.ones(2) * i, "labels": i % 2} for i in range(8)]
    args = TrainingArguments(
        folder, use_cpu=True, report_to="none", max_steps=int(steps), per_device_train_batch_size=2, save_steps=2,
        push_to_hub=True, hub_model_id="me/victim", hub_strategy="all_checkpoints", save_total_limit=1,
    )  # fmt: skip
    Trainer(model=Net(), args=args, train_dataset=items).train(resume_from_checkpoint="auto")
    print("the end", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
