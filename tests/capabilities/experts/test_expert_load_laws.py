"""The load of experts: what is logged, what does not count, and what a resumed run continues from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Decision, ExpertLoad, Extension, StepFacts, Trainer
from trainwright.errors import ModelError

from ..._support.small import StopAt
from ...parity.sides import OURS

EXPERTS = 4
# Expert of each of the 8 samples of a step; the last id is of no expert.
ROUTES = [0, 0, 0, 0, 1, 1, 2, EXPERTS]


class Experts(nn.Module):
    """A layer that is given the ids of its experts, as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.ones(EXPERTS, 2, 2))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(1) @ self.weight[ids.clamp(max=EXPERTS - 1)]).squeeze(1)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: torch.Tensor, route: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.experts(x, route).sum(1)
        return {"loss": (out - labels).square().mean(), "logits": out}


def rows(steps: int = 6) -> list[dict[str, Any]]:
    return [
        {"x": torch.ones(2) * (i + 1) / 8, "route": route, "labels": 1.0}
        for _ in range(steps)
        for i, route in enumerate(ROUTES)
    ]


def trainer_of(folder: Path, *extensions: Extension, **more: Any) -> Trainer:
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 2,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "learning_rate": 1e-3,
    }
    trainer: Trainer = OURS.make(Routed(), folder, settings | more, train_dataset=rows(), eval_dataset=rows(1))
    for extension in (ExpertLoad(each=True), *extensions):
        trainer.add_extension(extension)
    return trainer


def logged(trainer: Trainer) -> list[dict[str, float]]:
    found = [{k: v for k, v in e.items() if k.startswith("experts/")} for e in trainer.state.log_history]
    return [entry for entry in found if entry]


EXPECTED = {
    "experts/max_load": 4 * EXPERTS / 7,  # of the routes that lead to an expert
    "experts/min_load": 0.0,
    "experts/unused": 1 / 4,
    "experts/dropped": 1 / 8,
    **{f"experts/experts/{i}": number * EXPERTS / 7 for i, number in enumerate((4, 2, 1, 0))},
}


def test_loads_are_logged(tmp_path: Path) -> None:
    """An evaluation between two logs does not count."""
    trainer = trainer_of(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert logged(trainer) == [pytest.approx(EXPECTED)] * 2
    assert not trainer.model.experts._forward_pre_hooks  # type: ignore[union-attr]


class Refuses(Extension):
    name = "refuses"

    def decide(self, facts: StepFacts) -> Decision:
        return Decision.SKIP if facts.step == 2 else Decision.APPLY


def test_a_step_that_is_refused_does_not_count(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Refuses(), logging_steps=1)
    trainer.train()
    assert len(logged(trainer)) == 3


class Interrupts(Extension):
    """Drops the micro-batches of one window by an error, after which the trainer tries it again in smaller ones."""

    name = "interrupts"

    def __init__(self) -> None:
        self.is_left = True

    def micro_batch(self, batch: Any) -> None:
        if self.is_left and batch.run.progress.state.global_step == 1:
            self.is_left = False
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_window_that_is_tried_again_counts_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Interrupts(), auto_find_batch_size=True)
    trainer.train()
    assert logged(trainer) == [pytest.approx(EXPECTED)] * 2


def test_a_resumed_run_continues_the_counts(tmp_path: Path) -> None:
    settings = {"logging_steps": 4, "save_strategy": "steps", "save_steps": 3}
    first = trainer_of(tmp_path, **settings)
    first.add_callback(StopAt(3))
    first.train()
    again = trainer_of(tmp_path, **settings)
    again.train(resume_from_checkpoint=True)
    assert logged(again)[-1:] == [pytest.approx(EXPECTED)]


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    plain: Any = OURS.make(nn.Linear(2, 2), tmp_path, {}, train_dataset=rows(1))
    plain.add_extension(ExpertLoad())
    with pytest.raises(ModelError, match="has no layer with num_experts"):
        plain.train()
