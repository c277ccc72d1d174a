"""Two processes, of which the second is slow: for a while in its forward passes, then in reading."""

import os
import sys
import time
from typing import Any

import torch

from tests._support.small import data, make_trainer, models

SLEEP_S = 0.05
is_second = os.environ["RANK"] == "1"


class Slow(torch.utils.data.Dataset[Any]):
    """Samples that take long to read in the second process, from step 50 on."""

    def __init__(self) -> None:
        self.rows = data.sequences(200)
        self.sleeps = False

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.sleeps:
            time.sleep(SLEEP_S)
        return self.rows[index]


rows = Slow()
trainer = make_trainer(
    sys.argv[1],
    model=models.seeded(models.llama),
    train_dataset=rows,
    per_device_train_batch_size=1,
    max_steps=70,
    logging_steps=10,
    save_strategy="steps",
    save_steps=1000,
    log_level="warning",
)


def sleep(module: object, inputs: object) -> None:
    step = trainer.state.global_step
    rows.sleeps = is_second and step >= 50
    if is_second and step < 30:
        time.sleep(SLEEP_S)


trainer.model.register_forward_pre_hook(sleep)
trainer.train()
