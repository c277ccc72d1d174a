"""A run with workers that start slowly: `group_victim.py FOLDER PLACE LOADER`. Says HERE at PLACE, in its second epoch.

LOADER "of the user" is a DataLoader of torch whose workers do not ignore signals.
"""

import os
import sys
from typing import Any

import safetensors.torch
import torch
from tests._support.arrival import announce
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainwright import Trainer, TrainingArguments

FOLDER = sys.argv[1]
PLACE = sys.argv[2]
LOADER = sys.argv[3]
NUM_SAMPLES = 24
BATCH = 4
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH
main_pid = os.getpid()
starts = 0


def before_a_fork() -> None:
    """Called by `os.fork` in this process."""
    global starts
    if os.getpid() != main_pid:
        return
    starts += 1
    if PLACE == "first worker" and starts == 3:  # of the second epoch
        announce()
    if PLACE == "between workers" and starts == 4:
        announce()


def in_a_worker() -> None:
    """Called first of all in a new process."""
    if PLACE == "in the worker" and starts == 4:
        announce()


class Numbers(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert get_worker_info() is not None
        return {"x": torch.full((3,), float(index)) / NUM_SAMPLES, "labels": index % 2}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Watched(Trainer):
    def get_train_dataloader(self) -> Any:
        if LOADER == "ours":
            return super().get_train_dataloader()
        return DataLoader(Numbers(), batch_size=BATCH, num_workers=2)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if PLACE == "in a step" and self.state.global_step == STEPS_PER_EPOCH + 1:
            announce()
        return super().training_step(*args, **kwargs)


os.register_at_fork(before=before_a_fork, after_in_child=in_a_worker)
torch.manual_seed(0)
arguments = TrainingArguments(
    FOLDER,
    use_cpu=True,
    disable_tqdm=True,
    num_train_epochs=3,
    per_device_train_batch_size=BATCH,
    learning_rate=1e-2,
    save_strategy="epoch",
    save_steps=STEPS_PER_EPOCH - 1,
    train_sampling_strategy="sequential",
    dataloader_num_workers=2,
    resume_from_checkpoint="auto",
)
trainer = Watched(Model(), arguments, train_dataset=Numbers())
trainer.train()
safetensors.torch.save_file(trainer.model.state_dict(), f"{FOLDER}/final.safetensors")
