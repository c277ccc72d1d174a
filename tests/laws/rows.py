"""Trainers on every backend under a launcher: `rows.py saves|goes_on FOLDER ROW...`. Judged by test_row_laws.py."""

import logging
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn

from tests._support.small import StopAt
from tests._support.two_processes import tell
from tests.contract import doubles
from tests.contract.counting import Record, counting_callback, counting_trainer
from tests.distributed.cases import trainer_of
from trainwright import TrainerCallback

ROWS: dict[str, dict[str, Any]] = {
    "whole": {},  # on one device, or DDP
    "fsdp full_shard": {"fsdp": True},
    "fsdp shard_grad_op": {"fsdp": "shard_grad_op auto_wrap"},
    "zero 2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "zero 3": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}
SAVED = "means, accumulated"
SPOILT_STEP = 3
STEPS = 5


def losses(trainer: Any, **how: Any) -> list[float]:
    trainer.train(**how)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -- a checkpoint goes on, whoever wrote it --------------------------------------------------------------------------


def saves(row: str, folder: Path, world: int) -> None:
    trainer = trainer_of(SAVED, folder / f"{row} by {world}", world, save_strategy="steps", save_steps=2, **ROWS[row])
    trainer.add_callback(StopAt(2))
    trainer.train()


def goes_on(row: str, folder: Path, world: int) -> None:
    for writers in (1, 2):
        trainer = trainer_of(SAVED, folder / "again", world, **ROWS[row])
        checkpoint = str(folder / f"{row} by {writers}/checkpoint-2")
        tell(**{f"{row} by {writers}": losses(trainer, resume_from_checkpoint=checkpoint)})


# -- a step that is skipped ------------------------------------------------------------------------------------------


class Spoilt(nn.Module):
    """Its gradients overflow in one process, in one step."""

    def __init__(self, is_spoilt: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.is_spoilt = is_spoilt
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x.to(self.layer.weight.dtype))
        self.calls += 1
        scale = math.inf if self.is_spoilt and self.calls == SPOILT_STEP else 1e-3  # small: fp16 begins at 2**16
        return {"loss": nn.functional.cross_entropy(logits.float(), labels) * scale, "logits": logits}


class Watches(TrainerCallback):
    """After each step: the weights, and how far the schedule is."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.seen: list[tuple[list[float], int]] = []

    def look(self) -> None:
        whole = self.trainer._trainwright.services.engine.whole_weights(self.trainer.model)
        state = self.trainer.model.state_dict() if whole is None else whole
        flat = [value for name in sorted(state) for value in state[name].double().flatten().tolist()]
        self.seen.append((flat, self.trainer.lr_scheduler.last_epoch))

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.look()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.look()


def skips(row: str, folder: Path, world: int) -> None:
    settings: dict[str, Any] = {"fp16": True}
    if row.startswith("zero"):  # DeepSpeed has no fp16 on the CPU; in bf16 it skips where it is told to look
        config = {**ROWS[row]["deepspeed"], "bf16": {"enabled": True, "check_grad_overflow": True}}
        settings = {"bf16": True, "deepspeed": config}
    torch.manual_seed(4)
    model = Spoilt(is_spoilt=int(os.environ["RANK"]) == world - 1)
    g = torch.Generator().manual_seed(3)
    rows = [{"x": torch.randn(6, generator=g), "labels": i % 3} for i in range(STEPS * 4 * world)]
    watches = Watches()
    trainer = doubles.trainer(
        folder / "skips",
        model=model,
        train_dataset=rows,
        callbacks=[watches],
        settings={**ROWS[row], **settings, "max_steps": STEPS, "learning_rate": 0.1, "max_grad_norm": 1.0},
    )
    watches.trainer = trainer
    trainer.train()
    pairs = list(zip(watches.seen, watches.seen[1:], strict=False))
    tell(
        **{
            f"{row}: moved": [before[0] != after[0] for before, after in pairs],
            f"{row}: schedule": [after[1] - before[1] for before, after in pairs],
        }
    )


# -- the hooks -------------------------------------------------------------------------------------------------------


def reaches(row: str, folder: Path, world: int) -> None:
    """A run with evaluations and saves, a second trainer that resumes it, evaluates, and predicts."""
    record = Record()
    output_dir = folder / f"{row} reached"
    settings = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "include_num_input_tokens_seen": "all",
        **ROWS[row],
    }
    for resume in (None, str(output_dir / "checkpoint-2")):
        trainer = doubles.trainer(
            output_dir,
            counting_trainer(record),
            settings=settings,
            model_init=lambda: doubles.model(),
            train_dataset=datasets.Dataset.from_list(doubles.samples(40)),
            eval_dataset=doubles.samples(8),
            callbacks=[counting_callback(record)],
        )
        trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    trainer.predict(doubles.samples(8))
    tell(**{f"{row}: reached": sorted(set(record))})


if __name__ == "__main__":
    logging.getLogger("trainwright").setLevel("ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed.(all_gather_into|reduce_scatter)_tensor`")
    FOLDER = Path(sys.argv[2])
    WORLD = int(os.environ["WORLD_SIZE"])
    for name in sys.argv[3:]:
        for law in (saves, skips, reaches) if sys.argv[1] == "saves" else (goes_on,):
            law(name, FOLDER, WORLD)
