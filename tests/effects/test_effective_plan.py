"""What is shown when training starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor, AdafactorSchedule

from trainwright import Trainer, TrainingArguments

from .._support.small import make_trainer, module
from .bench import Bench, StopAt

START = ("batch", "length", "optimizer", "schedule", "settings", "resumes")


def shown(bench: Bench, **given: Any) -> list[str]:
    """The lines of the plan, as printed."""
    bench.capsys.readouterr()
    bench.train(disable_tqdm=False, log_level="warning", **given)
    return [line for line in bench.capsys.readouterr().out.splitlines() if line.split(" ")[0] in START]


def test_the_plan_of_a_run_by_epochs(bench: Bench) -> None:
    settings = {"gradient_accumulation_steps": 3, "logging_steps": 0.5, "warmup_steps": 0.5, "num_train_epochs": 2}
    assert shown(bench, **settings) == [
        "batch     2 per device x 3 accumulated x 1 process = 6 samples a step",
        "length    4 steps, 2 epochs of 2 steps over 12 samples",
        "optimizer adamw_torch_fused, learning rate 0.1, linear after 2 warm-up steps, on cpu in full precision",
        "schedule  logs every 2 steps, evaluates never, saves never",
        "settings  log_level='warning', per_device_eval_batch_size=4, use_cpu=True",
    ]


def test_the_plan_of_a_run_by_steps(bench: Bench) -> None:
    settings = {
        "max_steps": 8,
        "num_train_epochs": 5,
        "bf16": True,
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine",
        "logging_strategy": "epoch",
        "eval_strategy": "epoch",
        "save_strategy": "best",
        "metric_for_best_model": "loss",
        "hub_token": "hf_secret",
    }
    lines = shown(bench, **settings)
    assert lines[:4] == [
        "batch     2 per device x 1 accumulated x 1 process = 2 samples a step",
        "length    8 steps, by max_steps, so num_train_epochs=5 has no effect",
        "optimizer adamw_torch, learning rate 0.1, cosine after 0 warm-up steps, on cpu in bf16 autocast",
        "schedule  logs every epoch, evaluates every epoch, saves at each best evaluation",
    ]
    assert "metric_for_best_model='loss'" in lines[4]
    assert "hub_token" not in lines[4], "a warning says that it has no effect"
    assert "greater_is_better" not in lines[4], "it follows from the metric"


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.1)


class MakesRmsprop(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=0.2)
        return self.optimizer


class MakesBoth(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=0.2)
        self.lr_scheduler = constant(self.optimizer)


class MakesSchedule(Trainer):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = constant(self.optimizer)
        return self.lr_scheduler


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"cls": MakesRmsprop}, "RMSprop, learning rate 0.2, linear after 0 warm-up steps"),
        ({"cls": MakesBoth}, "RMSprop, learning rate 0.2, ConstantLR"),
        ({"cls": MakesSchedule}, "adamw_torch_fused, learning rate 0.1, ConstantLR"),
        (
            {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 0.3})},
            "NAdam, learning rate 0.3, linear after 0 warm-up steps",
        ),
        ({"groups": (0.1, 0.1), "schedule": constant}, "SGD, learning rate 0.1, ConstantLR"),
        ({"groups": (0.1, 0.01)}, "SGD, learning rates 0.01 to 0.1, linear after 0 warm-up steps"),
        ({"finds_rate": True}, "Adafactor, AdafactorSchedule"),
    ],
)
def test_the_plan_names_the_optimizer_that_trains(
    parts: dict[str, Any], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = module()
    optimizers = {}
    if "groups" in parts:
        groups = [{"params": [p], "lr": parts["groups"][i % 2]} for i, p in enumerate(model.parameters())]
        optimizer: Any = torch.optim.SGD(groups)
        optimizers["optimizers"] = (optimizer, parts["schedule"](optimizer) if "schedule" in parts else None)
    if "finds_rate" in parts:
        optimizer = Adafactor(model.parameters(), warmup_init=True)
        optimizers["optimizers"] = (optimizer, AdafactorSchedule(optimizer))
    given = {name: value for name, value in parts.items() if name not in ("groups", "schedule", "finds_rate")}
    trainer = make_trainer(tmp_path, model=model, learning_rate=0.1, log_level="warning", **optimizers, **given)
    for _ in range(2):
        trainer.train()
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("optimizer")]
        assert line == f"optimizer {expected}, on cpu in full precision"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"run_name": "a", "project": "b"}, "run_name, project have no effect without report_to."),
        ({"hub_model_id": "me/it", "hub_token": "hf_x"}, "hub_model_id, hub_token have no effect without push_to_hub."),
        ({"dataloader_timeout": 5}, "dataloader_timeout has no effect without dataloader_num_workers."),
        ({"debug": "tpu_metrics_debug"}, "debug='tpu_metrics_debug' has no effect"),
    ],
)
def test_a_setting_without_effect_is_in_its_warning_only(bench: Bench, given: dict[str, Any], said: str) -> None:
    lines = shown(bench, weight_decay=0.1, **given)
    assert said in bench.caplog.text
    assert "weight_decay=0.1" in lines[4]
    assert not [name for name in given if name in lines[4]]


def test_a_setting_with_an_effect_in_part_stays_in_the_list(bench: Bench) -> None:
    given = {"include_for_metrics": ["inputs", "weights"]}
    assert "include_for_metrics" in shown(bench, **given)[4]
    assert "has no effect" in bench.caplog.text


def test_a_resumed_run_says_where_it_goes_on(bench: Bench) -> None:
    first = bench.train(callbacks=[StopAt(2)])
    checkpoint = f"{first.args.output_dir}/checkpoint-2"
    lines = shown(bench, resume_from_checkpoint=checkpoint)
    assert lines[-1] == f"resumes   {checkpoint}: step 2, 2 batches into epoch 1"
    assert "checkpoint" not in "".join(lines[:-1]), "it is told once"


def test_the_plan_is_printed_without_the_bar_too(bench: Bench) -> None:
    bench.train(log_level="info")
    logged = [record.getMessage() for record in bench.caplog.records if record.levelno == logging.INFO]
    assert not [line for line in logged if line.split(" ")[0] in START]
    printed = [line.split(" ")[0] for line in bench.capsys.readouterr().out.splitlines()]
    assert [word for word in printed if word in START] == [*START[:5]]


def test_printing_arguments_shows_what_they_come_to() -> None:
    args = TrainingArguments(
        "run",
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        warmup_steps=0.1,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        optim="sgd",
    )
    assert str(args).splitlines()[1:5] == [
        "  # batch     4 per device x 3 accumulated x 1 process = 12 samples a step",
        "  # length    3 epochs",
        "  # optimizer sgd, learning rate 5e-05, linear after a warm-up of 0.1 of all steps, in bf16 autocast",
        "  # schedule  logs every 10 steps, evaluates every epoch, saves never",
    ]
    assert "  # length    7 steps" in str(TrainingArguments("run", use_cpu=True, max_steps=7)).splitlines()
