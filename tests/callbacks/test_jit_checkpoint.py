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


class AsksAt(TrainerCallback):
    def __init__(self, callback: JITCheckpointCallback, step: int) -> None:
        self.callback, self.step = callback, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            assert self.callback.jit_manager is not None
            self.callback.jit_manager.is_checkpoint_requested = True


def test_a_request_saves_the_step_and_stops(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    callback = JITCheckpointCallback()
    trainer = make_trainer(tmp_path, callbacks=[callback, AsksAt(callback, 4)], enable_jit_checkpoint=True)
    callback.set_trainer(trainer)
    trainer.train()
    assert trainer.state.global_step == 5
    assert CheckpointStore(tmp_path).steps() == [5]
    assert signal.getsignal(signal.SIGTERM) == before


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
