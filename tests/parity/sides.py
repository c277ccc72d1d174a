"""One row, trained on one side: what came of it, in a form that two sides can be compared in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import trainwright

# Wall-clock entries of a log: the only ones that two runs may differ in.
CLOCK = ("runtime", "samples_per_second", "steps_per_second", "tokens_per_second")

Log = list[dict[str, float]]


class Digest(str):
    """Stands for a tensor or an array of which only the equality is asked: type, shape and bits in few letters."""

    MARK = "#"

    @classmethod
    def of(cls, values: torch.Tensor | np.ndarray | Digest) -> Digest:
        """The digest of an array; a digest is its own."""
        if isinstance(values, Digest):
            return values
        kind = values.dtype
        shape = tuple(values.shape)
        array = (
            values.detach().contiguous().view(-1).view(torch.uint8).numpy()
            if isinstance(values, torch.Tensor)
            else values
        )
        return cls(cls.MARK + hashlib.sha256(f"{kind}{shape}".encode() + array.tobytes()).hexdigest()[:8])


Weights = Mapping[str, torch.Tensor | Digest]


@dataclass(frozen=True)
class Side:
    name: str
    trainer: Callable[..., Any]
    arguments: Callable[..., Any]

    def make(self, model: nn.Module | None, output_dir: Path, settings: dict[str, Any], **parts: Any) -> Any:
        always = {
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "log_level": "error",
        }
        args = self.arguments(output_dir=str(output_dir), **always | settings)
        return self.trainer(model=model, args=args, **parts)

    def train(self, trainer: Any, **how: Any) -> Outcome:
        out = trainer.train(**how)
        return Outcome(
            weights(trainer.model), without_clock(trainer.state.log_history), out.global_step, out.training_loss
        )


REFERENCE = Side("transformers", transformers.Trainer, transformers.TrainingArguments)
OURS = Side("trainwright", trainwright.Trainer, trainwright.TrainingArguments)


@dataclass(frozen=True)
class Outcome:
    weights: Weights
    log: Log
    global_step: int
    training_loss: float

    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.log if "loss" in entry]


def weights(model: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def without_clock(log: Log) -> Log:
    return [{key: value for key, value in entry.items() if not key.endswith(CLOCK)} for entry in log]


def differing(ours: Weights, theirs: Weights) -> dict[str, float]:
    """The parameters that are not bit for bit the same, with the largest gap of each; NaN where one is a digest."""
    assert list(ours) == list(theirs)
    return {name: _gap(ours[name], theirs[name]) for name in theirs if not are_equal(ours[name], theirs[name])}


def are_equal(one: torch.Tensor | np.ndarray | Digest, other: torch.Tensor | np.ndarray | Digest) -> bool:
    """Whether two arrays are bit for bit the same; either may be a digest."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return Digest.of(one) == Digest.of(other)


def _gap(one: torch.Tensor | Digest, other: torch.Tensor | Digest) -> float:
    if isinstance(one, Digest) or isinstance(other, Digest):
        return float("nan")
    return (one - other).abs().max().item()


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    """Logs first: the step at which they part says more than the weights at the end."""
    for mine, other in zip(ours.log, theirs.log, strict=False):
        assert mine == other
    assert len(ours.log) == len(theirs.log)
    assert ours.global_step == theirs.global_step
    assert differing(ours.weights, theirs.weights) == {}
    assert ours.training_loss == theirs.training_loss
