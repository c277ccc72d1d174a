"""Optimizer, schedule and arguments there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Seq2SeqTrainingArguments, TrainingArguments
from trainwright.checkpoint import training_state
from trainwright.errors import CheckpointError

from .._support.small import StopAt, make_trainer
from .._support.subprocesses import run_python


def stepped(optimizer_of: Any) -> tuple[Any, Any, nn.Linear]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler, model


def save(optimizer: Any, scheduler: Any, folder: Path) -> None:
    training_state.save_optimizer(optimizer.state_dict(), folder)
    training_state.save_scheduler(scheduler, folder)


def load(optimizer: Any, scheduler: Any, folder: Path) -> None:
    training_state.load_optimizer(optimizer, folder, load=lambda fresh, state: fresh.load_state_dict(state))
    training_state.load_scheduler(scheduler, folder)


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make", [adam, momentum])
def test_optimizer_and_schedule_come_back(make: Any, tmp_path: Path) -> None:
    optimizer, scheduler, _ = stepped(make)
    save(optimizer, scheduler, tmp_path)
    model = nn.Linear(3, 2)
    fresh = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(fresh, 2)
    load(fresh, schedule, tmp_path)
    assert str(fresh.state_dict()) == str(optimizer.state_dict())
    assert schedule.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_missing_file_is_named_with_the_way_out(name: str, tmp_path: Path) -> None:
    optimizer, scheduler, _ = stepped(adam)
    save(optimizer, scheduler, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"has no {name}.*without\s+resume_from_checkpoint"):
        load(optimizer, scheduler, tmp_path)


def test_another_number_of_parameters(tmp_path: Path) -> None:
    optimizer, scheduler, _ = stepped(adam)
    save(optimizer, scheduler, tmp_path)
    other = adam(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).parameters())
    with pytest.raises(CheckpointError, match="does not fit this AdamW"):
        load(other, torch.optim.lr_scheduler.StepLR(other, 2), tmp_path)


def test_another_optimizer(tmp_path: Path) -> None:
    """Its state would be taken for Adam's and used from the first step on."""
    optimizer, scheduler, _ = stepped(momentum)
    save(optimizer, scheduler, tmp_path)
    other = adam(nn.Linear(3, 2).parameters())
    with pytest.raises(CheckpointError, match="AdamW"):
        load(other, torch.optim.lr_scheduler.StepLR(other, 2), tmp_path)


def test_parameters_of_another_shape(tmp_path: Path) -> None:
    optimizer, scheduler, _ = stepped(adam)
    save(optimizer, scheduler, tmp_path)
    other = adam(nn.Linear(4, 2).parameters())
    with pytest.raises(CheckpointError, match="AdamW"):
        load(other, torch.optim.lr_scheduler.StepLR(other, 2), tmp_path)


class Pictures(nn.Module):
    """A small model whose weights may be in either memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.convolution(pixel_values).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(scores, labels)}


FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop"])
@pytest.mark.parametrize("resumed", FORMATS)
@pytest.mark.parametrize("saved", FORMATS)
def test_a_model_may_be_resumed_in_another_memory_format(
    saved: torch.memory_format, resumed: torch.memory_format, optim: str, tmp_path: Path
) -> None:
    def train(memory_format: torch.memory_format, folder: str, **more: Any) -> nn.Module:
        torch.manual_seed(0)
        model = Pictures()
        model.to(memory_format=memory_format)  # type: ignore[call-overload]
        rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": number % 2} for number in range(24)]
        settings: dict[str, Any] = {
            "max_steps": 6,
            "learning_rate": 0.05,
            "optim": optim,
            "preflight": False,
            "log_level": "error",
        }
        if optim == "sgd":
            settings["optim_args"] = "momentum=0.9"
        trainer = make_trainer(tmp_path / folder, model=model, train_dataset=rows, **settings, **more)
        trainer.train(resume_from_checkpoint="auto")
        return model

    whole = train(resumed, "whole")
    train(saved, "resumed", callbacks=[StopAt(3)])
    found = train(resumed, "resumed")
    for mine, other in zip(found.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


WRONG_STATES: dict[str, Any] = {
    "empty": lambda one: torch.empty(0),
    "shorter": lambda one: one[:1].clone(),
    "flat": lambda one: one.flatten()[:3].clone(),
    "a number": lambda one: torch.tensor(1.0),
    "more dimensions": lambda one: torch.ones(*one.shape, 3),
    "bool": lambda one: one.bool(),
    "int": lambda one: one.long(),
    "complex": lambda one: one.to(torch.complex64),
    "sparse": lambda one: one.to_sparse(),
    "meta": lambda one: one.to("meta"),
    "text": lambda one: "text",
    "list": lambda one: [1.0],
}
WRONG_SETTINGS: dict[str, Any] = {
    "lr": ["0.1", None, [0.1], 10**400, float("nan"), torch.zeros(3)],
    "eps": ["x", {}, torch.zeros(2)],
    "betas": [(0.9,), (0.9, 0.99, 0.9, 0.9), 0.9, ("a", "b")],
    "weight_decay": [None, "x", 10**400],
    "amsgrad": [7, "x", torch.zeros(1)],
    "initial_lr": [[1.0], {}, "x"],
}


def adamw_state() -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer, optimizer.state_dict()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("change", WRONG_STATES.values(), ids=WRONG_STATES)
def test_a_state_that_no_run_writes_is_refused(change: Any, name: str, tmp_path: Path) -> None:
    """A fused kernel would go through memory that is not the state's."""
    optimizer, state = adamw_state()
    state["state"][0][name] = change(state["state"][0][name])
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        training_state.load_optimizer(optimizer, tmp_path, load=lambda mine, saved: mine.load_state_dict(saved))


def test_a_state_without_memory_of_its_own_gets_some(tmp_path: Path) -> None:
    optimizer, state = adamw_state()
    state["state"][0]["exp_avg_sq"] = torch.ones(1).expand(2, 3)
    torch.save(state, tmp_path / "optimizer.pt")
    training_state.load_optimizer(optimizer, tmp_path, load=lambda mine, saved: mine.load_state_dict(saved))
    parameter = optimizer.param_groups[0]["params"][0]
    assert optimizer.state[parameter]["exp_avg_sq"].stride() == parameter.stride()


@pytest.mark.parametrize(("name", "value"), [(name, one) for name, values in WRONG_SETTINGS.items() for one in values])
def test_a_setting_that_no_run_writes_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    optimizer, state = adamw_state()
    state["param_groups"][0][name] = value
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        training_state.load_optimizer(optimizer, tmp_path, load=lambda mine, saved: mine.load_state_dict(saved))


def test_arguments_are_plain_values(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), learning_rate=3e-4, lr_scheduler_kwargs={"a": 1}, use_cpu=True
    )
    training_state.save_arguments(args, tmp_path)
    values = json.loads((tmp_path / "training_args.json").read_text())
    assert values["learning_rate"] == 3e-4
    for weights_only in (True, False):
        read = torch.load(tmp_path / "training_args.bin", weights_only=weights_only)
        assert read == {name: None if name.endswith("_token") else value for name, value in args.to_dict().items()}
        assert (read.learning_rate, read.lr_scheduler_kwargs) == (3e-4, {"a": 1})
        assert TrainingArguments(**read) == args


def test_arguments_of_a_class_that_cannot_be_pickled_are_a_dict(tmp_path: Path) -> None:
    class OfAFunction(TrainingArguments):
        pass

    training_state.save_arguments(OfAFunction(str(tmp_path)), tmp_path)
    values = json.loads((tmp_path / "training_args.json").read_text())
    read = torch.load(tmp_path / "training_args.bin", weights_only=True)
    assert read == {**values, "hub_token": None}


@pytest.mark.process
def test_arguments_open_where_this_package_is_not_installed(tmp_path: Path) -> None:
    training_state.save_arguments(Seq2SeqTrainingArguments(str(tmp_path), lr_scheduler_type="cosine"), tmp_path)
    script = (
        "import sys, torch; sys.modules['trainwright'] = sys.modules['transformers'] = None; "
        "print(*(torch.load(sys.argv[1], weights_only=w).lr_scheduler_type for w in (True, False)))"
    )
    assert run_python("-c", script, str(tmp_path / "training_args.bin")).stdout.split() == ["cosine", "cosine"]
