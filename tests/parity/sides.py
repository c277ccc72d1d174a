"""One row, trained on one side: what came of it, in a form that two sides can be compared in."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import trainwright

# Wall-clock entries of a log: the only ones that two runs may differ in.
CLOCK = ("runtime", "samples_per_second", "steps_per_second", "tokens_per_second")

Weights = dict[str, torch.Tensor]
Log = list[dict[str, float]]


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

    def train(self, trainer: Any, **how: Any) -> "Outcome":
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
    """The parameters that are not bit for bit the same, with the largest gap of each."""
    assert list(ours) == list(theirs)
    return {
        name: (ours[name] - theirs[name]).abs().max().item()
        for name in theirs
        if not torch.equal(ours[name], theirs[name])
    }


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    """Logs first: the step at which they part says more than the weights at the end."""
    for mine, other in zip(ours.log, theirs.log, strict=False):
        assert mine == other
    assert len(ours.log) == len(theirs.log)
    assert ours.global_step == theirs.global_step
    assert differing(ours.weights, theirs.weights) == {}
    assert ours.training_loss == theirs.training_loss
