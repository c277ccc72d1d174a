"""How often a step copies the random states: once where its fetch may draw, and not at all where nothing can."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainwright import TrainerCallback

from .._support.small import Augmented, data, make_trainer, module

SETTINGS: dict[str, Any] = {"num_train_epochs": 2, "report_to": "none", "save_strategy": "no", "logging_steps": 100}


class Counts(TrainerCallback):
    """Copies of python's states from the end of a step to that of the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = 0
        self.at_step: list[int] = []
        original = random.getstate

        def counted() -> Any:
            self.total += 1
            return original()

        monkeypatch.setattr(random, "getstate", counted)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at_step.append(self.total)

    @property
    def of_steps(self) -> list[int]:
        return [now - before for before, now in zip(self.at_step, self.at_step[1:], strict=False)]


def drawing() -> Any:
    return Augmented(data.vectors(26))


ROWS: dict[str, tuple[Any, dict[str, Any], int]] = {  # dataset, settings, most copies of a step within an epoch
    "a list": (lambda: data.vectors(26), {}, 0),
    "draws": (drawing, {}, 1),
    "draws, saves": (drawing, {"save_strategy": "steps", "save_steps": 100, "save_on_exception": True}, 1),
    "seeded samples": (drawing, {"seed_samples": True}, 1),
    "draws, windows of two": (drawing, {"gradient_accumulation_steps": 2}, 1),
    "draws, windows of two, saves": (drawing, {"gradient_accumulation_steps": 2, "save_strategy": "steps"}, 2),
    "draws, no bundles": (drawing, {"incidents": False}, 1),
}


@pytest.mark.parametrize("row", ROWS)
def test_copies_of_a_step(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, settings, most = ROWS[row]
    counts = Counts(monkeypatch)
    trainer = make_trainer(tmp_path, train_dataset=make(), callbacks=[counts], **SETTINGS | settings)
    trainer.train()
    per_epoch = trainer.state.global_step // 2
    within = counts.of_steps[1 : per_epoch - 2]  # the first step is watched, the last window may be smaller
    assert set(within) == {most}


class DrawsFromNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = module()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(x * float(np.random.rand()) + random.random(), labels)


def test_a_model_that_draws_from_numpy_has_all_states_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    trainer = make_trainer(tmp_path, model=DrawsFromNumpy(), callbacks=[counts], **SETTINGS)
    trainer.train()
    assert set(counts.of_steps[1:5]) == {1}
