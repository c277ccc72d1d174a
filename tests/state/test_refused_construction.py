"""A construction that is refused changes nothing in the process, nor does a training that is refused before step 1."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from trainwright import Trainer, TrainerCallback, TrainingArguments
from trainwright.checkpoint import rng

from .._support.small import data, make_trainer, module

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGCHLD")
LOGGERS = (None, "trainwright", "transformers", "accelerate", "torch")


def process() -> dict[str, Any]:
    """What a construction must leave alone."""
    cudnn = torch.backends.cudnn
    loggers = [logging.getLogger(name) for name in LOGGERS]
    return {
        "dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": dict(os.environ),
        "signals": [signal.getsignal(getattr(signal, name)) for name in SIGNALS],
        "loggers": [(logger.level, list(logger.handlers)) for logger in loggers],
        "states": [dict(kind._shared_state) for kind in (PartialState, AcceleratorState, GradientState)],
        "threads": threading.active_count(),
        "random": [str(state) for state in rng.plain(rng.capture()).values()],
    }


def draw() -> None:
    """Leaves random states that no seed has given."""
    random.random()
    np.random.random()
    torch.rand(1)


REFUSED: dict[str, dict[str, Any]] = {
    "tf32": {"tf32": True, "use_cpu": False},
    "tf32 on the CPU": {"tf32": True},
    "no evaluation set": {"eval_strategy": "steps"},
    "determinism": {"eval_strategy": "steps", "full_determinism": True},
    "log level": {"eval_strategy": "steps", "log_level": "debug"},
    "memory metrics": {"eval_strategy": "steps", "skip_memory_metrics": False},
    "half precision": {"eval_strategy": "steps", "bf16": True},
    "tracker": {"report_to": "nonsense"},
    "sharding": {"fsdp": "full_shard"},
    "two precisions": {"bf16": True, "fp16": True},
    "range": {"learning_rate": -1.0, "full_determinism": True},
    "unknown name": {"nonsense": 1},
    "unknown key": {"accelerator_config": {"nonsense": 1}},
    "compilation": {"eval_strategy": "steps", "torch_compile": True},
}


@pytest.fixture
def no_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def construct(folder: Path, settings: dict[str, Any]) -> Trainer:
    args = TrainingArguments(str(folder), **{"use_cpu": True, "report_to": "none"} | settings)
    return Trainer(module(), args, train_dataset=data.vectors(4))


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
def test_a_refused_construction_changes_nothing(settings: dict[str, Any], no_state: None, tmp_path: Path) -> None:
    draw()
    before = process()
    with pytest.raises((ValueError, TypeError)):
        construct(tmp_path, settings)
    assert process() == before


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
def test_it_leaves_a_trainer_alone_that_was_made_before(
    settings: dict[str, Any], no_state: None, tmp_path: Path
) -> None:
    trainer = construct(tmp_path, {"bf16": True})
    draw()
    before = process()
    with pytest.raises((ValueError, TypeError)):
        construct(tmp_path, settings)
    assert process() == before
    assert trainer.accelerator.mixed_precision == "bf16"


def test_a_constructor_of_a_subclass_may_be_refused_too(no_state: None, tmp_path: Path) -> None:
    class Own(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
            os.environ["OF_A_SUBCLASS"] = "1"
            raise RuntimeError("refused")

    before = process()
    with pytest.raises(RuntimeError, match="refused"):
        Own(module(), TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=data.vectors(4))
    assert process() == before


# -- a training --------------------------------------------------------------------------------------------------------


def lbfgs() -> dict[str, Any]:
    model = module()
    return {"model": model, "optimizers": (torch.optim.LBFGS(model.parameters()), None)}


def model_that_changes_the_process() -> torch.nn.Module:
    torch.rand(3)
    torch.set_default_dtype(torch.float64)
    os.environ["OF_A_MODEL"] = "1"
    return module()


REFUSED_TRAININGS: dict[str, dict[str, Any]] = {
    "no such checkpoint": {"resume_from_checkpoint": "nowhere"},
    "no data": {"train_dataset": []},
    "a model that changes the process": {
        "model": None,
        "model_init": model_that_changes_the_process,
        "train_dataset": [],
    },
    "optimizer": lbfgs(),
    "metric": {
        "eval_dataset": data.vectors(4),
        "eval_strategy": "steps",
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "metric_for_best_model": "nothing_like_it",
    },
    "an item without a state": {"items": {"counter": object()}},
}


@pytest.mark.parametrize("settings", REFUSED_TRAININGS.values(), ids=REFUSED_TRAININGS)
def test_a_refused_training_changes_nothing(settings: dict[str, Any], no_state: None, tmp_path: Path) -> None:
    settings = dict(settings)
    items = settings.pop("items", {})
    dtype = torch.get_default_dtype()
    trainer = make_trainer(tmp_path, max_steps=2, **settings)
    trainer.checkpoint_items.update(items)
    torch.set_default_dtype(dtype)  # of a model that changes it in the constructor too
    os.environ.pop("OF_A_MODEL", None)
    draw()
    before = process()
    with pytest.raises(Exception, match=r"."):
        trainer.train()
    assert process() == before


def test_what_a_training_changed_after_its_beginning_is_its_own(no_state: None, tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.environ["OF_A_CALLBACK"] = "1"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, callbacks=[Fails()]).train()
    assert os.environ.pop("OF_A_CALLBACK") == "1"
