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
        self.forward_s = 0.0  # of the last forward pass, which takes longer on a busy machine

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.sleeps:
            time.sleep(SLEEP_S + 3 * self.forward_s)
        return self.rows[index]


rows = Slow()
trainer = make_trainer(
    sys.argv[1],
    model=models.seeded(models.llama),
    train_dataset=rows,
    per_device_train_batch_size=1,
    max_steps=90,
    logging_steps=10,
    save_strategy="steps",
    save_steps=1000,
    log_level="warning",
)


def begin(module: object, inputs: object) -> None:
    step = trainer.state.global_step
    rows.sleeps = is_second and step >= 50
    if is_second and step < 30:
        time.sleep(SLEEP_S)
    rows.forward_s = time.perf_counter()


def end(module: object, inputs: object, outputs: object) -> None:
    rows.forward_s = time.perf_counter() - rows.forward_s


trainer.model.register_forward_pre_hook(begin)
trainer.model.register_forward_hook(end)
trainer.train()
