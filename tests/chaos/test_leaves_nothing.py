"""Fifty trainings in one process, some ended by errors and signals, leave nothing of themselves in it."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import TrainerCallback

from .._support.small import data, make_trainer, module

NUM_TRAININGS = 50
LOGGERS = (None, "trainwright", "transformers", "accelerate", "torch", "datasets")
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def process() -> dict[str, Any]:
    """What must be as before."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # of a closed queue, which ends shortly after it
            thread.join(5)
    cudnn = torch.backends.cudnn
    loggers = [logging.getLogger(name) for name in LOGGERS]
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(os.readlink(f"/proc/self/fd/{number}") for number in open_files()),
        "children": len(multiprocessing.active_children()),
        "loggers": [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers],
        "excepthook": threading.excepthook,
    }


def open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself
            os.readlink(f"/proc/self/fd/{number}")
            found.append(number)
    return found


def hooks_of(model: torch.nn.Module, optimizer: Any) -> list[int]:
    """Counts the hooks on a model, its parameters and its optimizer."""
    counts = [len(getattr(part, name)) for part in model.modules() for name in HOOKS]
    counts += [len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) for parameter in model.parameters()]
    counts += [len(parameter._backward_hooks or ()) for parameter in model.parameters()]
    return counts + [len(getattr(optimizer, name, ())) for name in OF_OPTIMIZERS]


class At(TrainerCallback):
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.act()


def fails() -> None:
    raise ZeroDivisionError


def signalled(number: signal.Signals) -> Callable[[], None]:
    return lambda: signal.raise_signal(number)


EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": data.vectors(4)}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "background saves": {"save_async": True},
    "error": {"callbacks": [At(fails)], "save_on_exception": True},
    "SIGTERM": {"callbacks": [At(signalled(signal.SIGTERM))]},
    "SIGINT": {"callbacks": [At(signalled(signal.SIGINT))], "save_async": True},
    "evaluation": EVALUATES,
    "memory": {"skip_memory_metrics": False, "callbacks": [At(fails)], **EVALUATES},
    "noise": {"neftune_noise_alpha": None, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2},
    "half precision": {"bf16": True},
    "steps": {},
    "refused": {"eval_strategy": "steps"},
    "time limit": {"hang_timeout": 600},
}
WITH_WORKERS: dict[str, dict[str, Any]] = {
    "workers": {"dataloader_num_workers": 2},
    "workers and SIGTERM": {"dataloader_num_workers": 2, "callbacks": [At(signalled(signal.SIGTERM))]},
    "workers and an error": {"dataloader_num_workers": 2, "callbacks": [At(fails)], **EVALUATES},
    "workers that persist": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, **EVALUATES},
    "workers that persist and an error": {
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
        "callbacks": [At(fails)],
    },
}


def train(kind: str, settings: dict[str, Any], folder: Path) -> None:
    model = module()
    before = hooks_of(model, None)
    trainer: Any = None
    try:
        trainer = make_trainer(
            folder, model=model, **{"max_steps": 3, "save_strategy": "steps", "save_steps": 2} | settings
        )
        if kind == "steps":
            for step in trainer.steps():
                for batch in step.batches:
                    step.backward(step.model(**batch)["loss"])
                step.update()
                if step.number == 2:
                    break
        else:
            trainer.train()
    except (ZeroDivisionError, SystemExit, KeyboardInterrupt, ValueError):
        if kind in ("plain", "workers"):
            raise
    assert hooks_of(model, getattr(trainer, "optimizer", None)) == before


def leave_nothing(kinds: dict[str, dict[str, Any]], number: int, folder: Path) -> None:
    """Trains once of each kind first: what is imported or begun by the first use of something stays."""
    for kind, settings in kinds.items():
        train(kind, settings, folder / f"first {kind}")
    before = process()
    for i in range(number):
        kind = list(kinds)[i % len(kinds)]
        train(kind, kinds[kind], folder / str(i))
        if i < len(kinds):
            after = process()
            assert after == before, f"{kind} left something: {differences(before, after)}"
    after = process()
    assert after == before, differences(before, after)


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


@pytest.mark.more
@pytest.mark.costly
def test_fifty_trainings_leave_nothing_in_the_process(tmp_path: Path) -> None:
    leave_nothing(KINDS, NUM_TRAININGS, tmp_path)


@pytest.mark.process
def test_trainings_with_workers_leave_nothing_in_the_process(tmp_path: Path) -> None:
    leave_nothing(WITH_WORKERS, 8, tmp_path)
