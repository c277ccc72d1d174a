"""Evaluating more often never changes what is trained: not the weights, not the mode of a part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import TrainerCallback

from .._support.small import data, differing, make_trainer, models, train

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "fp16": {"fp16": True},
}


# An evaluation after the last step leaves its model at the average: compared step by step.
SCHEDULE_FREE: dict[str, Any] = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}


class Normed(models.ReturnsDict):
    """Dropout, and statistics that are gathered while training."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__(dropout)
        self.body = nn.Sequential(nn.Linear(models.FEATURES, 12), nn.BatchNorm1d(12), nn.Dropout(dropout))


class Freezes(TrainerCallback):
    """Keeps the statistics of a part of the model as they are, as one does with a pretrained backbone."""

    def __init__(self) -> None:
        self.modes: list[tuple[bool, bool]] = []

    def on_train_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
        model.body.eval()

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.modes.append((model.training, model.body[1].training))


def ends_with(folder: Path, *, eval_steps: int | None, callbacks: Any = (), **settings: Any) -> Any:
    evaluated = {"eval_strategy": "steps", "eval_steps": eval_steps, "eval_on_start": True} if eval_steps else {}
    trainer = make_trainer(
        folder,
        model=models.seeded(Normed),
        eval_dataset=data.vectors(9),
        max_steps=6,
        callbacks=list(callbacks),
        **evaluated,
        **settings,
    )
    return train(trainer).weights


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_weights_are_those_of_a_run_without_evaluations(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = ends_with(tmp_path, eval_steps=None, **settings)
    assert differing(ends_with(tmp_path, eval_steps=1, **settings), plain) == {}


def test_schedule_free_weights_after_each_step(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    settings = SCHEDULE_FREE

    class Weights(TrainerCallback):
        def __init__(self) -> None:
            self.sums: list[float] = []

        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            self.sums.append(sum(float(p.detach().double().sum()) for p in model.parameters()))

    kept = Weights(), Weights()
    for one, steps in zip(kept, (None, 1), strict=True):
        ends_with(tmp_path, eval_steps=steps, callbacks=[one], **settings)
    assert kept[0].sums == kept[1].sums
    assert len({*kept[0].sums}) == 6


def test_a_schedule_free_run_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    """A checkpoint right after an evaluation has the averaged weights; a resume goes on as the run itself did."""
    pytest.importorskip("schedulefree")
    settings = SCHEDULE_FREE | {"save_strategy": "steps", "save_steps": 3}
    whole = ends_with(tmp_path / "whole", eval_steps=3, **settings)
    trainer = make_trainer(
        tmp_path / "whole",
        model=models.seeded(Normed),
        eval_dataset=data.vectors(9),
        max_steps=6,
        eval_strategy="steps",
        eval_steps=3,
        **settings,
    )
    resumed = train(trainer, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert differing(resumed.weights, whole) == {}


@pytest.mark.parametrize("eval_steps", [None, 1])
def test_a_part_in_evaluation_mode_stays_so(eval_steps: int | None, tmp_path: Path) -> None:
    freezes = Freezes()
    ends_with(tmp_path, eval_steps=eval_steps, callbacks=[freezes])
    assert freezes.modes == [(True, False)] * 6


def test_a_model_left_in_evaluation_mode_is_trained(tmp_path: Path) -> None:
    class Generates(TrainerCallback):
        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            model.eval()

    plain = ends_with(tmp_path, eval_steps=None)
    assert differing(ends_with(tmp_path, eval_steps=None, callbacks=[Generates()]), plain) == {}


def test_listeners_of_an_evaluation_see_a_model_in_evaluation_mode(tmp_path: Path) -> None:
    """As in the original: who generates samples there needs no dropout."""
    modes: list[bool] = []

    class Generates(TrainerCallback):
        def on_evaluate(self, *args: Any, model: Any, **kwargs: Any) -> None:
            modes.append(model.training)

    ends_with(tmp_path, eval_steps=2, callbacks=[Generates()])
    assert modes == [False] * 4


def test_results_are_ordinary_tensors(tmp_path: Path) -> None:
    """A module may keep what it computes, and be trained with it afterwards: nothing is an inference tensor."""

    class Keeps(models.ReturnsDict):
        kept: torch.Tensor | None = None

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if self.kept is None:
                self.kept = x.mean(0, keepdim=True) * 0.1
            return super().forward(x + self.kept, labels)

    trainer = make_trainer(
        tmp_path,
        model=models.seeded(Keeps),
        eval_dataset=data.vectors(9),
        eval_strategy="epoch",
        eval_on_start=True,
        max_steps=2,
    )
    trainer.train()
    assert trainer.model.kept is not None
