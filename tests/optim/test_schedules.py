"""Learning-rate schedules: the rates of transformers, over the steps of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from trainwright.optim.schedules import current_rate, follows_metrics, make_schedule

from .._support.small import data, make_trainer

NAMES = ["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_restarts"]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (3, 10), (37, 1001)])
def test_the_rates_of_transformers(name: str, warmup: int, steps: int) -> None:
    rates = []
    for make in (
        lambda o: make_schedule(name, o, num_warmup_steps=warmup, num_training_steps=steps),
        lambda o: get_scheduler(name, o, num_warmup_steps=warmup, num_training_steps=steps),
    ):
        schedule = make(chosen := optimizer())
        course = []
        for _ in range(steps + 2):  # a rate is asked for after the last step too
            course.append(current_rate(schedule, chosen))
            chosen.step()
            schedule.step()
        rates.append(course)
    assert rates[0] == rates[1]
    if warmup and name != "constant":
        assert rates[0][0] == 0.0
        assert max(rates[0]) == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_goes_on_from_the_state_that_transformers_saved(name: str) -> None:
    theirs = get_scheduler(name, optimizer(), num_warmup_steps=2, num_training_steps=9)
    for _ in range(4):
        theirs.optimizer.step()
        theirs.step()
    ours = make_schedule(name, chosen := optimizer(), num_warmup_steps=2, num_training_steps=9)
    ours.load_state_dict(theirs.state_dict())
    for schedule in (ours, theirs):
        schedule.optimizer.step()
        schedule.step()
    assert current_rate(ours, chosen) == current_rate(theirs, theirs.optimizer)
    states = [{k: v for k, v in one.state_dict().items() if k != "lr_lambdas"} for one in (ours, theirs)]
    assert states[0] == states[1]
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("warmup", [4, 0.29])
def test_the_logged_rate_is_the_one_of_the_step(warmup: float, tmp_path: Path) -> None:
    """14 steps, 4 of warm-up (a share is rounded up): the first step has rate 0."""
    trainer = make_trainer(tmp_path, warmup_steps=warmup, learning_rate=0.1)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    rise = -(-14 * warmup // 1) if warmup < 1 else warmup
    expected = [0.1 * s / rise if s < rise else 0.1 * (14 - s) / (14 - rise) for s in range(14)]
    assert rates == pytest.approx(expected)


def test_one_that_follows_a_metric_is_driven_by_evaluations(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "threshold": 0.5},
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=data.vectors(4),
        metric_for_best_model="loss",
    )
    trainer.train()
    assert follows_metrics(trainer.lr_scheduler)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[:4] == [0.01] * 4
    assert rates[4] == pytest.approx(0.001)


@pytest.mark.parametrize("value", [0.3, torch.tensor(0.3)], ids=["number", "tensor"])
def test_the_current_rate_is_a_plain_number(value: Any) -> None:
    chosen = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=value)
    schedule = torch.optim.lr_scheduler.ConstantLR(chosen, factor=1.0)
    rate = current_rate(schedule, chosen)
    assert type(rate) is float
    assert rate == pytest.approx(0.3)
