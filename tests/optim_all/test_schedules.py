"""Every schedule against its formula, written out here; its settings; its resume; and those that evaluations drive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.optimization

import trainwright
from trainwright import TrainerCallback
from trainwright.config.enums import SchedulerType
from trainwright.errors import ArgumentError
from trainwright.optim.schedules import BUILDERS, WITHOUT_OPTIONS, make_schedule, schedule_options

from ..parity.sides import REFERENCE, differing, weights
from .table import Row, losses, make_trainer, sentences
from .test_optimizer_laws import StopAt

LR = 0.2
WARMUP = 3
STEPS = 12
Formula = Callable[[int], float]


def after_warmup(shape: Callable[[float], float]) -> Formula:
    """k / W up to step W, then `shape` of the share of the rest that is done, 0 to 1."""
    return lambda k: k / WARMUP if k < WARMUP else shape((k - WARMUP) / (STEPS - WARMUP))


def stable(k: int) -> float:
    """From a tenth up for 3 steps, 5 at the top, down for 4 in half a cosine to a tenth, and there it stays."""
    if k < 3:
        return 0.1 + 0.9 * k / 3
    share = min(1.0, max(0, k - 8) / 4)
    return 0.1 + 0.9 * (1 + cos(pi * share)) / 2


def half_cosine(share: float) -> float:
    return (1 + cos(pi * share)) / 2


# name, lr_scheduler_kwargs, what multiplies the rate of step k (from 0)
FORMULAS: list[tuple[str, dict[str, Any], Formula]] = [
    ("linear", {}, after_warmup(lambda share: 1 - share)),
    ("cosine", {}, after_warmup(half_cosine)),
    ("cosine", {"num_cycles": 1.5}, after_warmup(lambda share: (1 + cos(3 * pi * share)) / 2)),
    ("cosine_with_restarts", {}, after_warmup(lambda share: half_cosine(share) if share < 1 else 0)),
    ("cosine_with_restarts", {"num_cycles": 3}, after_warmup(lambda share: half_cosine(3 * share % 1) * (share < 1))),
    ("polynomial", {"power": 2.0}, after_warmup(lambda share: (1 - 1e-7 / LR) * (1 - share) ** 2 + 1e-7 / LR)),
    ("polynomial", {"lr_end": 0.1}, after_warmup(lambda share: 0.5 * (1 - share) + 0.5)),
    ("constant", {}, lambda k: 1.0),
    ("constant_with_warmup", {}, lambda k: min(1.0, k / WARMUP)),
    ("inverse_sqrt", {}, lambda k: k / WARMUP if k < WARMUP else (WARMUP / k) ** 0.5),
    ("inverse_sqrt", {"timescale": 5}, lambda k: k / WARMUP if k < WARMUP else (5 / (k + 2)) ** 0.5),
    ("cosine_with_min_lr", {"min_lr": 0.05}, after_warmup(lambda share: 0.75 * half_cosine(share) + 0.25)),
    ("cosine_with_min_lr", {"min_lr_rate": 0.4}, after_warmup(lambda share: 0.6 * half_cosine(share) + 0.4)),
    (
        # warm-up from 0.4 x rate; then the cosine, one step further along
        "cosine_warmup_with_min_lr",
        {"min_lr": 0.05, "warmup_lr_rate": 0.4},
        lambda k: 0.4 + 0.6 * k / 2 if k < WARMUP else 0.75 * half_cosine((k - 2) / (STEPS - WARMUP)) + 0.25,
    ),
    ("warmup_stable_decay", {"num_decay_steps": 4, "min_lr_ratio": 0.1}, stable),
]
DRIVEN = ("reduce_lr_on_plateau", "greedy")


def optimizer(lr: float = LR) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def schedule(name: str, options: Any = None, made_for: Any = None) -> Any:
    return make_schedule(
        name, made_for or optimizer(), num_warmup_steps=WARMUP, num_training_steps=STEPS, options=options
    )


def test_every_schedule_has_a_formula_or_is_driven() -> None:
    assert {name for name, _, _ in FORMULAS} | set(DRIVEN) == set(BUILDERS) == {kind.value for kind in SchedulerType}


def short_id(value: object) -> str:
    """The same in each process that collects the tests: no address of a function in it."""
    return "formula" if callable(value) else str(value)[:40]


@pytest.mark.parametrize(("name", "options", "formula"), FORMULAS, ids=short_id)
def test_it_equals_its_formula(name: str, options: dict[str, Any], formula: Formula) -> None:
    made = schedule(name, options)
    rates = []
    for _ in range(STEPS + 1):
        rates.append(made.get_last_lr()[0])
        made.optimizer.step()
        made.step()
    assert rates == pytest.approx([LR * formula(k) for k in range(STEPS + 1)], abs=1e-12)


@pytest.mark.parametrize(("name", "options", "formula"), FORMULAS, ids=short_id)
def test_it_goes_on_where_it_was(name: str, options: dict[str, Any], formula: Formula) -> None:
    whole = schedule(name, options)
    first = schedule(name, options)
    for made in (whole, first):
        for _ in range(5):
            made.optimizer.step()
            made.step()
    saved = copy.deepcopy((first.state_dict(), first.optimizer.state_dict()))
    second = schedule(name, options)
    second.optimizer.load_state_dict(saved[1])
    second.load_state_dict(saved[0])
    for _ in range(5, STEPS):
        assert second.get_last_lr() == whole.get_last_lr()
        for made in (whole, second):
            made.optimizer.step()
            made.step()


@pytest.mark.parametrize("name", BUILDERS)
def test_an_unknown_setting_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    message = f"names 'nonsense', which lr_scheduler_type='{name}' does not take"
    if name in WITHOUT_OPTIONS:  # transformers takes it, and makes nothing of it
        schedule(name, {"nonsense": 1})
        assert f"{message}; it takes none. It has no effect." in caplog.text
    else:
        with pytest.raises(ArgumentError, match=message):
            schedule(name, {"nonsense": 1})
    assert not {"optimizer", "num_warmup_steps", "num_training_steps"} & set(schedule_options(name))


def test_a_misspelt_setting_is_guessed() -> None:
    with pytest.raises(ArgumentError, match="Did you mean 'num_cycles'"):
        schedule("cosine", {"num_cycle": 2})


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"])
def test_a_setting_that_it_cannot_do_without_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"'{name}' needs lr_scheduler_kwargs="):
        make_trainer(tmp_path, Row("sgd"), lr_scheduler_type=name).train()


@pytest.mark.parametrize("name", [*BUILDERS.values(), "get_scheduler", "GreedyLR", "Adafactor", "AdafactorSchedule"])
def test_the_builders_are_transformers_own(name: str) -> None:
    assert getattr(trainwright, name) is getattr(transformers.optimization, name)


# -- driven by evaluations --------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "reduce_lr_on_plateau": {"factor": 0.5, "patience": 0, "threshold": 0.5},
    "greedy": {"factor": 0.5, "patience": 0, "smooth": True, "window_size": 3, "min_lr": 1e-4},
}


def driven(name: str, **more: Any) -> dict[str, Any]:
    return {
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": SETTINGS[name],
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": sentences(8),
        "num_train_epochs": 3,
        **more,
    }


def logged_rates(trainer: Any) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


@pytest.mark.framework
@pytest.mark.parametrize("name", DRIVEN)
def test_evaluations_drive_it_as_in_transformers(name: str, tmp_path: Path) -> None:
    ours = make_trainer(tmp_path / "ours", Row("sgd", lr=0.1), **driven(name))
    ours.train()
    theirs = make_trainer(tmp_path / "theirs", Row("sgd", lr=0.1), REFERENCE, **driven(name))
    theirs.train()
    assert logged_rates(ours) == logged_rates(theirs)
    assert len(set(logged_rates(ours))) > 2
    assert differing(weights(ours.model), weights(theirs.model)) == {}


@pytest.mark.parametrize("name", DRIVEN)
def test_what_evaluations_drive_resumes_exactly(name: str, tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", Row("sgd", lr=0.1), **driven(name))
    whole.train()
    make_trainer(tmp_path / "parts", Row("sgd", lr=0.1), **driven(name, callbacks=[StopAt(7)])).train()
    second = make_trainer(tmp_path / "parts", Row("sgd", lr=0.1), **driven(name))
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole)
    assert logged_rates(second) == logged_rates(whole)


def test_a_plateau_may_follow_another_metric(tmp_path: Path) -> None:
    """A metric that never gets better halves the rate at each evaluation but the first."""

    class Rates(TrainerCallback):
        seen: list[float] = []  # noqa: RUF012

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(kwargs["optimizer"].param_groups[0]["lr"])

    settings = driven("reduce_lr_on_plateau", metric_for_best_model="flat", greater_is_better=True, max_steps=8)
    trainer = make_trainer(tmp_path, Row("sgd", lr=0.8), callbacks=[Rates], **settings)
    trainer.compute_metrics = lambda prediction: {"flat": 1.0}
    trainer.train()
    assert Rates.seen == pytest.approx([0.8, 0.8, 0.4, 0.2])
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
