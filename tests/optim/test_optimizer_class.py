"""Optimizers by name: the class and the arguments that transformers gives them, as far as no package is needed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainwright import Trainer, TrainingArguments, is_optimizer_factory
from trainwright.config import resolve
from trainwright.config.plans import FSDPPlan
from trainwright.errors import ArgumentError

from .._support.small import make_trainer

ALWAYS: dict[str, Any] = {"output_dir": "run", "use_cpu": True, "report_to": "none"}
ADAM = {"learning_rate": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1}
CASES: list[dict[str, Any]] = [
    {},
    {"optim": "adamw_torch"},
    {"optim": "adamw_torch_fused"},
    {"optim": "adafactor"},
    {"optim": "sgd"},
    {"optim": "adagrad"},
    {"optim": "rmsprop"},
]


@pytest.mark.parametrize("more", [{}, ADAM], ids=["defaults", "adam"])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_class_and_arguments_are_those_of_transformers(settings: dict[str, Any], more: dict[str, Any]) -> None:
    ours = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(**ALWAYS | settings | more))
    theirs = transformers.Trainer.get_optimizer_cls_and_kwargs(
        transformers.TrainingArguments(**ALWAYS | settings | more)
    )
    assert ours[0] is theirs[0]
    assert ours[1] == theirs[1]


@pytest.mark.parametrize(
    ("optim", "optim_args", "expected"),
    [
        ("sgd", "momentum=0.9, nesterov=true", {"momentum": 0.9, "nesterov": True}),
        ("sgd", "dampening=0.1", {"dampening": 0.1}),
        ("rmsprop", "alpha=0.9,centered=True", {"alpha": 0.9, "centered": True}),
        ("adagrad", "lr_decay=0.5", {"lr_decay": 0.5}),
    ],
)
def test_optim_args_become_arguments(optim: str, optim_args: str, expected: dict[str, Any], tmp_path: Path) -> None:
    optimizer = make_trainer(tmp_path, optim=optim, optim_args=optim_args).create_optimizer()
    assert {name: optimizer.param_groups[0][name] for name in expected} == expected


@pytest.mark.parametrize(
    ("optim", "optim_args", "words"),
    [
        ("sgd", "momentum", ("momentum", "name=value")),
        ("sgd", "momentum=quick", ("momentum", "quick", "number")),
        ("sgd", "nesterov=maybe", ("nesterov", "maybe")),
    ],
)
def test_optim_args_that_make_no_sense(optim: str, optim_args: str, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as error:
        make_trainer(tmp_path, optim=optim, optim_args=optim_args).create_optimizer()
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_an_option_that_the_optimizer_does_not_take_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, log_level="warning", optim="sgd", optim_args="momentun=0.9").create_optimizer()
    assert "'momentun', which has no effect: optim='sgd'" in caplog.text
    assert "'momentum'" in caplog.text


@pytest.mark.parametrize(
    ("plan", "launcher", "is_refused"),
    [
        (None, "2", False),
        (FSDPPlan(settings={}), "1", True),
        (FSDPPlan(settings={"version": 1}), "2", False),
        (FSDPPlan(settings=None), "1", False),
        (FSDPPlan(settings=None), "2", True),
    ],
    ids=["whole", "fsdp", "version 1", "launcher's version 1", "launcher's version 2"],
)
def test_adafactor_is_refused_where_weights_are_distributed_tensors(
    plan: FSDPPlan | None, launcher: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first update fails there, also in transformers' Trainer, with torch's words about mixed tensors."""
    monkeypatch.setenv("FSDP_VERSION", launcher)
    monkeypatch.setattr(resolve, "fsdp", lambda args: plan)
    args = TrainingArguments(**ALWAYS, optim="adafactor")
    if not is_refused:
        assert Trainer.get_optimizer_cls_and_kwargs(args)[0] is transformers.optimization.Adafactor
        return
    with pytest.raises(ArgumentError) as error:
        Trainer.get_optimizer_cls_and_kwargs(args)
    words = ("optim='adafactor'", "rows and columns", "fsdp", "optim='adamw_torch'", "'sgd'")
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(("trained", "is_refused"), [(True, True), (False, False)])
def test_adafactor_is_refused_for_a_model_in_parts(trained: bool, is_refused: bool) -> None:
    """As `from_pretrained` loads one with `DistributedConfig(tp_size=...)`; here the only process has all parts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(4, 4)
        part = distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        model.weight = torch.nn.Parameter(part, requires_grad=trained)
        args = TrainingArguments(**ALWAYS, optim="adafactor")
        refused = pytest.raises(ArgumentError, match=r"'adafactor'.* loaded in parts.*'adamw_torch'")
        with refused if is_refused else contextlib.nullcontext():
            Trainer.get_optimizer_cls_and_kwargs(args, model)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("thing", "expected"),
    [(torch.optim.SGD, False), (transformers.optimization.Adafactor, False), (lambda: None, True), (dict, True)],
)
def test_what_makes_an_optimizer_from_a_model(thing: Any, expected: bool) -> None:
    assert is_optimizer_factory(thing) is expected


class Factory:
    """Made without arguments, called with the model."""

    def __call__(self, model: torch.nn.Module, *, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": lr} for p in model.parameters()])


def test_a_factory_gets_the_model(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, optimizer_cls_and_kwargs=(Factory, {"lr": 0.25}), max_steps=2)
    trainer.train()
    assert len(trainer.optimizer.param_groups) == len(list(trainer.model.parameters()))
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 0.25
