"""Parameters and groups that come during a run: trained if the optimizer has them, otherwise named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, SequentialLR

from trainwright import TrainerCallback
from trainwright.errors import CheckpointError

from .._support.small import StopAt, data, differing, make_trainer, module, weights


class Frozen(TrainerCallback):
    """Calls a function once: at the beginning of the second epoch, or at another event of a step."""

    def __init__(self, change: Callable[[nn.Module, Any], None], event: str = "on_epoch_begin", step: int = 7) -> None:
        self.change = change
        self.step = step
        setattr(self, event, self.look)

    def look(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == self.step:
            self.change(model, optimizer)
            self.step = -1


def unfreeze(model: Any, optimizer: Any) -> None:
    model.body.requires_grad_(True)


def unfreeze_and_add(model: Any, optimizer: Any) -> None:
    unfreeze(model, optimizer)
    optimizer.add_param_group({"params": [*model.body.parameters()], "lr": 1e-3})


def add_head(model: Any, optimizer: Any) -> None:
    model.second = nn.Linear(3, 3)


def freeze(model: Any, optimizer: Any) -> None:
    model.body.requires_grad_(False)


def frozen() -> Any:
    model = module()
    model.body.requires_grad_(False)
    return model


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "since the optimizer was made" in r.getMessage()]


@pytest.mark.parametrize("event", ["on_epoch_begin", "on_step_end", "on_log"])
@pytest.mark.parametrize(
    ("make", "change", "names"),
    [
        (frozen, unfreeze, "4 parameters (body.0.weight, body.0.bias, body.1.weight, ...) require"),
        (module, add_head, "2 parameters (second.weight, second.bias) require"),
        (frozen, unfreeze_and_add, None),
        (module, freeze, None),
        (frozen, freeze, None),
    ],
)
def test_what_the_optimizer_lacks_is_named_once(
    make: Any, change: Any, names: str | None, event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    trainer = make_trainer(tmp_path, model=model, callbacks=[Frozen(change, event)], log_level="warning")
    trainer.train()
    assert len(said(caplog)) == (names is not None)
    assert names is None or (names in said(caplog)[0] and "add_param_group" in said(caplog)[0])


def test_parameters_that_an_optimizer_of_the_users_leaves_out_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = module()
    optimizers = (torch.optim.SGD(model.head.parameters(), lr=0.1), None)
    make_trainer(tmp_path, model=model, optimizers=optimizers, log_level="warning").train()
    assert said(caplog) == []


def test_in_a_loop_of_ones_own_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = frozen()
    trainer = make_trainer(tmp_path, model=model, log_level="warning")
    for step in trainer.steps():
        for batch in step.batches:
            step.backward(trainer.compute_loss(step.model, batch))
        step.update()
        if step.number == 3:
            unfreeze(model, None)
    assert len(said(caplog)) == 1


SCHEDULES: dict[str, Any] = {
    "linear": {},
    "constant": {"lr_scheduler_type": "constant"},
    "polynomial": {"lr_scheduler_type": "polynomial"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "metric_for_best_model": "loss"},
    "greedy": {"lr_scheduler_type": "greedy", "eval_strategy": "epoch", "metric_for_best_model": "loss"},
}


@pytest.mark.parametrize("event", ["on_epoch_begin", "on_step_end", "on_pre_optimizer_step", "on_optimizer_step"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_group_that_is_added_is_trained_by_the_schedule(name: str, event: str, tmp_path: Path) -> None:
    settings = SCHEDULES[name] | {"eval_dataset": data.vectors(4)}
    model = frozen()
    before = [p.detach().clone() for p in model.body.parameters()]
    trainer = make_trainer(tmp_path, model=model, callbacks=[Frozen(unfreeze_and_add, event)], **settings)
    rates: list[list[float]] = []
    schedule = type(
        "Rates", (TrainerCallback,), {"on_step_end": lambda *_, **__: rates.append(trainer.get_learning_rates())}
    )
    trainer.add_callback(schedule())
    assert trainer.train().global_step == 14
    assert all(not torch.equal(p, old) for p, old in zip(model.body.parameters(), before, strict=True))
    assert rates[-2][-1] / rates[-2][0] == pytest.approx(1e-3 / 1e-2)


def one_of(kind: str, optimizer: Any) -> Any:
    if kind == "lambdas":
        return LambdaLR(optimizer, [lambda step: 0.9**step])
    if kind == "cosine":
        return CosineAnnealingLR(optimizer, T_max=14)
    parts = [ConstantLR(optimizer, factor=0.5, total_iters=3), LambdaLR(optimizer, lambda step: 0.5**step)]
    return SequentialLR(optimizer, parts, milestones=[5])


@pytest.mark.parametrize("kind", ["lambdas", "cosine", "sequence"])
def test_so_with_a_schedule_of_the_users_own(kind: str, tmp_path: Path) -> None:
    model = frozen()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1e-2)
    optimizers = (optimizer, one_of(kind, optimizer))
    trainer = make_trainer(tmp_path, model=model, optimizers=optimizers, callbacks=[Frozen(unfreeze_and_add)])
    assert trainer.train().global_step == 14
    assert len(trainer.lr_scheduler.get_last_lr()) == 2


def add_if_missing(model: Any, optimizer: Any) -> None:
    if len(optimizer.param_groups) == 2:
        unfreeze_and_add(model, optimizer)


@pytest.mark.parametrize("step", [8, 10])
@pytest.mark.parametrize("changes", [{}, {"learning_rate": 2e-3}], ids=["same", "other rate"])
def test_a_resume_has_the_groups_that_were_added(changes: dict[str, Any], step: int, tmp_path: Path) -> None:
    def trainer(name: str, *callbacks: Any, **settings: Any) -> Any:
        added = [Frozen(add_if_missing), *callbacks]
        return make_trainer(tmp_path / name, model=frozen(), callbacks=added, **settings)

    whole = trainer("whole")
    whole.train()
    trainer("cut", StopAt(step)).train()
    again = trainer("cut", **changes)
    assert again.train(resume_from_checkpoint=True).global_step == 14
    assert len(again.optimizer.param_groups) == 3
    if not changes:
        assert differing(weights(again.model), weights(whole.model)) == {}


def test_a_resume_names_the_module_that_is_missing(tmp_path: Path) -> None:
    def add(model: Any, optimizer: Any) -> None:
        add_head(model, optimizer)
        optimizer.add_param_group({"params": [*model.second.parameters()]})

    make_trainer(tmp_path, callbacks=[Frozen(add), StopAt(9)]).train()
    with pytest.raises(CheckpointError, match=r"second\.weight, second\.bias had been added"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_another_accumulation_during_a_run_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Doubles(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.gradient_accumulation_steps = 2

    trainer = make_trainer(tmp_path, callbacks=[Doubles()], max_steps=4)
    with caplog.at_level(logging.WARNING, "trainwright"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert sum("gradient_accumulation_steps was set to 2" in one.getMessage() for one in caplog.records) == 1
