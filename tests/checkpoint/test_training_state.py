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
