"""A training that uploads all its checkpoints, to be killed: `python victim.py RUN STEPS`. HF_ENDPOINT has the Hub."""

from __future__ import annotations

import os
import sys

import torch
from huggingface_hub import constants
from torch import nn

from trainwright import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


def ask_the_hub_of_the_environment() -> None:
    """A fork has read these variables before it was given its own."""
    files = constants.HUGGINGFACE_CO_URL_TEMPLATE.split("/", 3)[3]
    constants.ENDPOINT = os.environ["HF_ENDPOINT"]
    constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{constants.ENDPOINT}/{files}"
    constants.HF_HUB_OFFLINE = False
    constants.HF_HUB_DISABLE_XET = True


def main(folder: str, steps: str) -> None:
    items = [{"x": torch.ones(2) * i, "labels": i % 2} for i in range(8)]
    args = TrainingArguments(
        folder,
        use_cpu=True,
        report_to="none",
        max_steps=int(steps),
        per_device_train_batch_size=2,
        save_steps=2,
        push_to_hub=True,
        hub_model_id="me/victim",
        hub_strategy="all_checkpoints",
        save_total_limit=1,
    )
    Trainer(model=Net(), args=args, train_dataset=items).train(resume_from_checkpoint="auto")
    print("the end", flush=True)


if __name__ == "__main__":
    ask_the_hub_of_the_environment()
    main(*sys.argv[1:])
