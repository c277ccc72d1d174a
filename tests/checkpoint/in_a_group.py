"""Trains in a control group whose memory has no room for a copy of the weights from the first step on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright import Trainer, TrainerCallback, TrainingArguments

GROUP = Path(sys.argv[1])
FOLDER = sys.argv[2]
SIZE = 4096  # weights of 64 MiB


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).pow(2).mean()}


class Limits(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            used = int((GROUP / "memory.usage_in_bytes").read_text())
            (GROUP / "memory.limit_in_bytes").write_text(str(used + 6 * SIZE * SIZE))  # 1.5 times the weights


(GROUP / "cgroup.procs").write_text(str(os.getpid()))
torch.manual_seed(0)
rows = [{"x": torch.ones(SIZE) * i, "labels": torch.tensor(0)} for i in range(4)]
arguments = TrainingArguments(
    FOLDER,
    use_cpu=True,
    max_steps=4,
    save_steps=2,
    logging_steps=1,
    optim="sgd",
    per_device_train_batch_size=1,
    disable_tqdm=True,
    report_to="none",
)
Trainer(Large(), arguments, train_dataset=rows, callbacks=[Limits()]).train()
