"""The look at the first step of every training: it says what is wrong, once, and nothing of the run changes by it."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor, AdafactorSchedule

from trainwright import Trainer, TrainerCallback

from .._support.small import Augmented, Diary, data, differing, make_trainer, models, module, train, weights
from .fixtures import FIXTURES


class Normed(models.ReturnsDict):
    """With statistics that each forward pass in training moves."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(dropout)
        self.body.append(nn.BatchNorm1d(12))


RUNS: dict[str, Any] = {
    "dropout": dict,
    "accumulated": lambda: {"gradient_accumulation_steps": 3},
    "statistics": lambda: {"model": models.seeded(Normed)},
    "augmented": lambda: {"train_dataset": Augmented(data.vectors(26))},
    "llama": lambda: {"model": models.seeded(models.llama), "train_dataset": data.sequences(12)},
    "evaluated": lambda: {"eval_dataset": data.vectors(8), "eval_strategy": "epoch"},
    "stream": lambda: {"train_dataset": data.Stream(data.vectors(26)), "max_steps": 6},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_with_it_and_without(name: str, tmp_path: Path) -> None:
    outcomes = []
    for preflight in (True, False):
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path / str(preflight), **RUNS[name](), preflight=preflight)
        outcomes.append((train(trainer), torch.get_rng_state(), np.random.get_state()[1], random.getstate()))
    (ours, *states), (plain, *plain_states) = outcomes
    assert differing(ours.weights, plain.weights) == {}
    assert ours.log == plain.log
    assert torch.equal(states[0], plain_states[0])
    assert np.array_equal(states[1], plain_states[1])
    assert states[2] == plain_states[2]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_after_a_check_up(name: str, tmp_path: Path) -> None:
    outcomes = []
    for is_checked in (True, False):
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path / str(is_checked), **RUNS[name]())
        if is_checked:
            trainer.check()
        outcomes.append(train(trainer))
    assert differing(outcomes[0].weights, outcomes[1].weights) == {}
    assert outcomes[0].log == outcomes[1].log


class Counts(Trainer):
    """How often each hook is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[str] = []
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("training_step")
        return super().training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("compute_loss")
        return super().compute_loss(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("get_batch_samples")
        return super().get_batch_samples(*args, **kwargs)

    def create_optimizer(self, *args: Any) -> Any:
        self.calls.append("create_optimizer")
        return super().create_optimizer(*args)


class Hears(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("step_begin")

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("pre_optimizer_step")


def test_hooks_callbacks_and_data_see_no_more_than_without(tmp_path: Path) -> None:
    seen = []
    for preflight in (True, False):
        diary = Diary(data.vectors(12))
        hears = Hears()
        trainer = make_trainer(
            tmp_path, cls=Counts, train_dataset=diary, callbacks=[hears], preflight=preflight, num_train_epochs=1
        )
        trainer.train()
        seen.append((trainer.calls, diary.reads, hears.events))
    assert seen[0] == seen[1]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "preflight" in r.name]


@pytest.mark.parametrize("name", ["masked_labels", "padding", "gradients", "finite_loss", "in_the_optimizer"])
def test_a_training_says_what_it_sees_and_goes_on(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = FIXTURES[name](tmp_path, True)
    trainer.args.max_skipped_steps = 0  # a run whose steps were all skipped ends with an error otherwise
    with caplog.at_level(logging.INFO, logger="trainwright"):
        logging.getLogger("trainwright").setLevel(logging.INFO)
        trainer.train()
    assert len([line for line in warned(caplog) if line.startswith(f"{name}: ")]) == 1
    assert trainer.state.global_step > 1


@pytest.mark.parametrize(
    ("settings", "num_warnings"),
    [
        ({"learning_rate": 0.0}, 1),
        ({"learning_rate": 0.1, "warmup_steps": 2}, 0),
        ({"learning_rate": 0.0, "lr_groups": {"head": 0.1}}, 0),
    ],
)
def test_a_learning_rate_of_zero_is_named(
    settings: dict[str, Any], num_warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a rate of zero at the beginning of a warm-up, or of some of the parameters."""
    make_trainer(tmp_path, log_level="warning", **settings).train()
    assert len([line for line in warned(caplog) if "learning rate is 0" in line]) == num_warnings


def test_an_optimizer_that_finds_its_rate_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = models.seeded(models.ReturnsDict)
    optimizer = Adafactor(model.parameters(), warmup_init=True)
    optimizers = (optimizer, AdafactorSchedule(optimizer))
    make_trainer(tmp_path, model=model, optimizers=optimizers, log_level="warning").train()
    assert not any("learning rate is 0" in line for line in warned(caplog))


@pytest.mark.parametrize("name", ["masked_labels", "padding", "gradients", "in_the_optimizer", "effective_batch"])
def test_nothing_is_said_where_all_is_well(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = FIXTURES[name](tmp_path, False)
    logging.getLogger("trainwright").setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, logger="trainwright"):
        trainer.train()
    assert [r.getMessage() for r in caplog.records if "preflight.check_up" in r.name] == []


def test_another_run_of_the_same_trainer_is_looked_at_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = FIXTURES["masked_labels"](tmp_path, True)
    trainer.args.max_skipped_steps = 0
    logging.getLogger("trainwright").setLevel(logging.WARNING)
    trainer.train()
    trainer.train()
    assert len([line for line in warned(caplog) if line.startswith("masked_labels")]) == 2


def test_a_check_up_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    model = models.seeded(Normed)
    model.head.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    trainer = make_trainer(tmp_path, model=model, eval_dataset=data.vectors(8))
    before = copy.deepcopy(model.state_dict())
    names = dict(vars(trainer))
    settings = trainer.args.to_dict()
    draws = torch.get_rng_state()
    trainer.check()
    assert differing(weights(model), before) == {}
    assert vars(trainer).keys() == names.keys()
    assert all(vars(trainer)[name] is value for name, value in names.items())
    assert trainer.args.to_dict() == settings
    assert torch.equal(torch.get_rng_state(), draws)
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.body[0].weight.grad is None
    assert not model.head.training
    assert trainer.optimizer is None


def test_the_checks_of_every_run_take_no_step_of_their_own(tmp_path: Path) -> None:
    passes: list[int] = []
    model = module()
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    trainer = make_trainer(tmp_path, model=model, max_steps=3, num_train_epochs=1)
    trainer.train()
    assert len(passes) == 3
