"""A model and samples of which one makes loss or gradient bad, and a run in which one update is left out by hand."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainwright
from trainwright.optim.adamw_bf16 import AdamWBF16

from ...contract import doubles

BATCH = 2
POISONS: dict[str, dict[str, Any]] = {
    "nan": {"x": torch.full((doubles.FEATURES,), torch.nan)},
    "inf": {"labels": torch.inf},
    "overflow": {"labels": 1e30},  # its square is infinite in fp32
    "loss-alone": {"constant": torch.nan},
    "infinite-loss-alone": {"constant": torch.inf},
    "gradient-alone": {"flat": 1.0},
}


class Model(doubles.Regressor):
    """Its loss is not finite where `constant` is not; its gradient alone is not finite where `flat` is 1."""

    def forward(self, x: Any, labels: Any = None, constant: Any = None, flat: Any = None) -> dict[str, Any]:
        outputs = super().forward(x, labels)
        if labels is not None:
            root = torch.sqrt(1.0 - flat + 0.0 * outputs["logits"]) - (1.0 - flat)  # its derivative at 0 is NaN
            outputs["loss"] = outputs["loss"] + constant.sum() + root.sum()
        return outputs


def samples(size: int = 24, poison: dict[int, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    rows = [{**row, "constant": 0.0, "flat": 0.0} for row in doubles.samples(size)]
    for index, values in (poison or {}).items():
        rows[index] |= values
    return rows


class LeavesOut(trainwright.TrainerCallback):
    """Has the updates of some steps do nothing: neither the optimizer nor the schedule moves."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for part in (kwargs["optimizer"], kwargs["lr_scheduler"]):
            part.step = self._sometimes(part.step, state)

    def _sometimes(self, step: Callable[..., Any], state: Any) -> Callable[..., Any]:
        @functools.wraps(step)
        def sometimes(*args: Any) -> Any:
            return None if state.global_step + 1 in self.steps else step(*args)

        return sometimes


class Hears(trainwright.TrainerCallback):
    def __init__(self) -> None:
        self.incidents: list[Any] = []

    def on_incident(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.incidents.append(kwargs["incident"])


def trainer(output_dir: Path, *, poison: dict[int, dict[str, Any]] | None = None, **parts: Any) -> Any:
    settings = {
        "per_device_train_batch_size": BATCH,
        "train_sampling_strategy": "sequential",
        "max_steps": 8,
        "logging_steps": 8,
        "lr_scheduler_type": "cosine",
    }
    given = parts.pop("settings", {})
    parts.setdefault("model", doubles.model(Model))
    data = samples(parts.pop("size", 24), poison)
    return doubles.trainer(output_dir, settings=settings | given, train_dataset=data, **parts)


def trained(output_dir: Path, **parts: Any) -> Any:
    one = trainer(output_dir, **parts)
    one.train()
    return one


def optimizer_of(model: nn.Module, name: str) -> Any:
    kinds = {
        "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "adamw-bf16": lambda p: AdamWBF16(p, lr=0.01),
        "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
        "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    }
    return kinds[name](model.parameters())
