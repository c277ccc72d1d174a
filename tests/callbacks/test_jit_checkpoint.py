"""A checkpoint that other code asks for is written where a step ends, and training stops there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from trainwright import CheckpointManager, JITCheckpointCallback, TrainerCallback
from trainwright.checkpoint.store import CheckpointStore

from .._support.small import make_trainer
from ..parity.sides import differing, weights


class AsksAt(TrainerCallback):
    """Asks once, at the first event of that name at which so many steps are finished."""

    def __init__(self, callback: JITCheckpointCallback, event: str, step: int) -> None:
        self.callback = callback
        self.step = step
        setattr(self, event, self.ask)

    def ask(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            assert self.callback.jit_manager is not None
            self.callback.jit_manager.is_checkpoint_requested = True
            self.step = -1


def jit_callback_of(trainer: Any) -> JITCheckpointCallback:
    (found,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, JITCheckpointCallback)]
    return found


@pytest.mark.parametrize(
    ("asked_at", "step", "saved"),
    [
        ("on_step_begin", 4, 4),  # seen before the update, of which the checkpoint has nothing
        ("on_pre_optimizer_step", 4, 5),
        ("on_log", 5, 5),  # seen at the next on_step_begin
        ("on_epoch_begin", 0, 0),
    ],
)
def test_a_request_saves_the_finished_step_and_stops(asked_at: str, step: int, saved: int, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path, enable_jit_checkpoint=True, logging_steps=5)
    trainer.add_callback(AsksAt(jit_callback_of(trainer), asked_at, step))
    trainer.train()
    assert CheckpointStore(tmp_path).steps() == [saved]
    assert trainer.state.global_step == saved + (asked_at != "on_pre_optimizer_step")
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_was_saved_between_steps_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    trainer = make_trainer(tmp_path / "cut", enable_jit_checkpoint=True, logging_steps=5)
    trainer.add_callback(AsksAt(jit_callback_of(trainer), "on_log", 5))
    trainer.train()
    again = make_trainer(tmp_path / "cut")
    again.train(resume_from_checkpoint=str(tmp_path / "cut/checkpoint-5"))
    assert again.state.global_step == whole.state.global_step > 5
    assert differing(weights(again.model), weights(whole.model)) == {}


def test_a_callback_of_the_users_is_the_one(tmp_path: Path) -> None:
    callback = JITCheckpointCallback()
    trainer = make_trainer(tmp_path, callbacks=[callback], enable_jit_checkpoint=True)
    assert jit_callback_of(trainer) is callback
    assert callback.jit_manager is not None


def test_without_the_setting_it_does_nothing(tmp_path: Path) -> None:
    callback = JITCheckpointCallback()
    trainer = make_trainer(tmp_path, callbacks=[callback], max_steps=2)
    callback.set_trainer(trainer)
    assert callback.jit_manager is None
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.skipif(os.name == "nt", reason="no SIGTERM to send")
def test_a_signal_outside_of_training_is_a_request(tmp_path: Path) -> None:
    manager = CheckpointManager(make_trainer(tmp_path), kill_wait=0)
    manager.setup_signal_handler()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.is_checkpoint_requested
    finally:
        manager.restore_signal_handler()
