"""Runs with an average, for one process and for several, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainwright.capabilities.averages.saved import read_average

from ...contract import doubles

STEPS = 6
KINDS: dict[str, Any] = {
    "exponential": {"kind": "ema", "decay": 0.8, "warmup": False},
    "with warm-up": "ema",
    "every second step": {"kind": "ema", "decay": 0.5, "every": 2},
    "mean": "swa",
    "mean of the second half": {"kind": "swa", "start": 0.5},
    "mean of the last": {"kind": "lawa", "last": 2},
    "mean of every second of the last": {"kind": "lawa", "last": 3, "every": 2, "start": 1},
    "in host memory": {"kind": "ema", "decay": 0.8, "memory": "host"},
}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"deepspeed": {"zero_optimization": {"stage": stage}, "train_batch_size": "auto", **more}}


def zero_in_bf16(stage: int) -> dict[str, Any]:
    return {"bf16": True, **zero(stage, bf16={"enabled": True})}


BACKENDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}},
    "zero 1": zero(1),
    "zero 2": zero(2),
    "zero 3": zero(3),
    "zero 1 in bf16": zero_in_bf16(1),
    "zero 3 in bf16": zero_in_bf16(3),
}
ON_CPU = {"DS_ACCELERATOR": "cpu"}  # variables of processes under DeepSpeed


def make(folder: Path, kind: str, *, size: int = 4, average: Any = None, **settings: Any) -> Any:
    """Returns a trainer whose run evaluates after step 2, 4 and 6, and saves after 3 and 6."""
    parts = {name: settings.pop(name) for name in ("model", "callbacks", "train_dataset") if name in settings}
    settings = {
        "average": average or KINDS[kind],
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "constant",
        "seed": 5,
        "incidents": False,
        "preflight": False,
    } | settings
    return doubles.trainer(folder, settings=settings, eval_dataset=doubles.samples(8), **parts)


def average_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read_average(checkpoint)


def weights_of(trainer: Any) -> dict[str, Any]:
    """The weights of a run that has ended, as numbers; all processes call it."""
    whole = trainer._trainwright.services.engine.whole_weights(trainer.model)
    state = trainer._trainwright.services.engine.unwrap(trainer.model).state_dict() if whole is None else whole
    return {name: value.detach().flatten().tolist() for name, value in state.items()}
