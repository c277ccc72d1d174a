"""A run whose forward passes wait for each other, as one of several processes. Which is slow, and where, is asked for.

Arguments: folder of the run; "fsdp" or "zero"; the phase in which the last process is slow, or "none".
"""

import os
import sys
import time
from typing import Any

import torch

from tests._support.small import data, make_trainer, models

folder, engine, phase = sys.argv[1:]
WORK_S = {"forward": 0.12, "data": 0.01, "none": 0.02}[phase]  # in each of two layers, in every process
SLOWER_S = {"forward": 0.3 * WORK_S, "data": 0.06, "none": 0.0}[phase]  # in a layer, or for a batch
is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "zero": {"deepspeed": {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}},
}


class Rows(torch.utils.data.Dataset[Any]):
    """Samples that may take long to read."""

    def __init__(self) -> None:
        self.rows = data.sequences(400)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if is_last and phase == "data":
            time.sleep(SLOWER_S)
        return self.rows[index]


def work(module: object, inputs: object) -> None:
    """Takes its time between two layers' weights, as arithmetic on a slower device does."""
    time.sleep(WORK_S + (SLOWER_S if is_last and phase == "forward" else 0.0))


model = models.seeded(models.llama)
for layer in model.model.layers:
    layer.mlp.register_forward_pre_hook(work)
trainer = make_trainer(
    folder,
    model=model,
    train_dataset=Rows(),
    eval_dataset=data.sequences(4),
    per_device_train_batch_size=1,
    max_steps=40,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=25,
    save_strategy="steps",
    save_steps=1000,
    log_level="warning",
    **ENGINES[engine],
)
trainer.train()
