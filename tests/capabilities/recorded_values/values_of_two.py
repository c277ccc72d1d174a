"""Two processes record their values: each trains one of the two micro-batches of a run of one process."""

import sys

from tests._support.small import data, make_trainer, models

trainer = make_trainer(
    sys.argv[1],
    model=models.seeded(models.llama),
    train_dataset=data.sequences(12),
    record_values=2,
    optim="sgd",
)
trainer.train()
