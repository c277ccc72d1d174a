"""Errors for want of memory with `auto_find_batch_size`, raised by callbacks and by the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import TrainerCallback
from trainwright.checkpoint.store import CheckpointStore

from .._support.small import data, make_trainer, module

FULL = "CUDA out of memory. Tried to allocate 1.00 TiB."
SETTINGS: dict[str, Any] = {
    "auto_find_batch_size": True,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 5,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_dataset": data.vectors(4),
}
# event -> the step after which it runs out of memory
EVENTS = {
    "on_train_begin": 0,
    "on_epoch_begin": 0,
    "on_step_begin": 2,
    "on_substep_end": 2,
    "on_pre_optimizer_step": 2,
    "on_optimizer_step": 2,
    "on_step_end": 2,
    "on_prediction_step": 2,
    "on_evaluate": 2,
    "on_log": 2,
    "on_save": 2,
    "on_epoch_end": 4,
    "on_train_end": 5,
}
# At these the whole window is tried again: all callbacks hear of it twice.
WITHIN = ("on_substep_end", "on_pre_optimizer_step")


class Heard(TrainerCallback):
    """Counts how often it hears of an event at a step."""

    def __init__(self, event: str, step: int) -> None:
        self.times = 0
        self.step = step
        setattr(self, event, self.hear)

    def hear(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times += state.global_step == self.step


class OutOfMemory(Heard):
    """Fails the first `failures` times."""

    def __init__(self, event: str, step: int, failures: int = 1) -> None:
        super().__init__(event, step)
        self.failures = failures

    def hear(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().hear(args, state, control, **kwargs)
        if state.global_step == self.step and self.times <= self.failures:
            raise torch.OutOfMemoryError(FULL)


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def logs(trainer: Any) -> list[tuple[int, list[str]]]:
    return [(entry["step"], sorted(entry)) for entry in trainer.state.log_history]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), model=module(0.0), **SETTINGS)
    trainer.train()
    return trainer


@pytest.mark.parametrize("event", EVENTS)
def test_a_callback_that_runs_out_of_memory_changes_only_the_micro_batches(
    event: str, whole: Any, tmp_path: Path
) -> None:
    first = Heard(event, EVENTS[event])
    fails = OutOfMemory(event, EVENTS[event])
    trainer = make_trainer(tmp_path, model=module(0.0), callbacks=[first, fails], **SETTINGS)
    trainer.train()
    assert trainer.state.global_step == 5
    assert CheckpointStore(tmp_path).steps() == [2, 4, 5]
    assert logs(trainer) == logs(whole)
    for one, other in zip(weights(trainer), weights(whole), strict=True):
        torch.testing.assert_close(one, other)
    assert fails.times >= 2
    assert first.times == (fails.times if event in WITHIN else fails.times - 1), "others hear of it once"
    assert trainer._trainwright.run.progress.window.num_parts == 2
    assert trainer.callback_handler.makes_room is None, "another run may be one without auto_find_batch_size"


@pytest.mark.parametrize("event", [event for event in EVENTS if event not in WITHIN])
def test_a_callback_that_still_does_not_fit_ends_the_run(event: str, tmp_path: Path) -> None:
    fails = OutOfMemory(event, EVENTS[event], failures=2)
    trainer = make_trainer(tmp_path, model=module(0.0), callbacks=[fails], **SETTINGS)
    with pytest.raises(RuntimeError, match="memory"):
        trainer.train()
    assert fails.times == 2


def test_without_auto_find_batch_size_the_error_ends_the_run(tmp_path: Path) -> None:
    fails = OutOfMemory("on_step_end", 2)
    settings = {**SETTINGS, "auto_find_batch_size": False}
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(tmp_path, callbacks=[fails], **settings).train()
    assert fails.times == 1


def test_another_error_of_a_callback_ends_the_run(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("of another kind")

    trainer = make_trainer(tmp_path, callbacks=[Fails()], **SETTINGS)
    with pytest.raises(RuntimeError, match="of another kind"):
        trainer.train()
    assert trainer._trainwright.run.progress.window.num_parts == 1


def full_at(number: int) -> Callable[[Any], torch.optim.Optimizer]:
    class Full(torch.optim.AdamW):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == number:
                raise torch.OutOfMemoryError(FULL)
            return super().step(closure)

    return Full


def test_an_update_that_cannot_be_undone_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    model = module(0.0)
    optimizer = full_at(4)(model.parameters())
    trainer = make_trainer(tmp_path, model=model, optimizers=(optimizer, None), **SETTINGS)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.train()
    assert "in the optimizer's update" in "".join(error.value.__notes__)
    assert "auto_find_batch_size=True finds the size" not in "".join(error.value.__notes__)
    assert CheckpointStore(tmp_path).steps() == [2]
