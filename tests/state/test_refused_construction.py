"""A construction that is refused changes nothing in the process."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from trainwright import Trainer, TrainingArguments

from .._support.small import data, module

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
    }


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
    before = process()
    with pytest.raises((ValueError, TypeError)):
        construct(tmp_path, settings)
    assert process() == before


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
def test_it_leaves_a_trainer_alone_that_was_made_before(
    settings: dict[str, Any], no_state: None, tmp_path: Path
) -> None:
    trainer = construct(tmp_path, {"bf16": True})
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
