"""A training script that is signalled: `victim.py FOLDER PHASE [SIGNALS]`. It stays in the phase for that number."""

import random
import sys
from typing import Any

import torch
from tests._support.arrival import announce
from torch import nn
from torch.utils.data import Dataset

from trainwright import Trainer, TrainingArguments, get_last_checkpoint

FOLDER = sys.argv[1]
PHASE = sys.argv[2]
NUM_SIGNALS = int(sys.argv[3]) if len(sys.argv) > 3 else 1
AT_STEP = 5
NUM_SAMPLES = 48


class Noisy(Dataset[dict[str, Any]]):
    """Draws at random for each sample, so that a resume has random states to get right."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.reads = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        if self.phase == PHASE == "data" and self.reads == 4 * AT_STEP + 3:
            announce(num_signals=NUM_SIGNALS)
        noise = torch.rand(3) + random.random()
        return {"x": torch.full((3,), float(index)) / NUM_SAMPLES + noise, "labels": index % 2}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Watched(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if PHASE == "train" and self.state.global_step == AT_STEP:
            announce(num_signals=NUM_SIGNALS)
        return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        if PHASE == "evaluate" and self.state.global_step == 6:
            announce(num_signals=NUM_SIGNALS)
        return super().prediction_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if PHASE == "save" and self.state.global_step == 8:
            announce(num_signals=NUM_SIGNALS)
        super()._save_optimizer_and_scheduler(output_dir)


torch.manual_seed(0)
arguments = TrainingArguments(
    FOLDER,
    use_cpu=True,
    disable_tqdm=True,
    num_train_epochs=2,
    per_device_train_batch_size=4,
    save_steps=8,
    eval_strategy="steps",
    eval_steps=6,
)
trainer = Watched(Model(), arguments, train_dataset=Noisy("data"), eval_dataset=Noisy("none"))
trainer.train(resume_from_checkpoint=get_last_checkpoint(FOLDER) is not None)
trainer.save_model()
