"""The share of time that training waits for data is measured, and much of it is worth a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainerCallback
from trainwright.run.console import DataWait
from trainwright.state.progress import DATA, OTHER, Clock

from .._support.small import Diary, data, make_trainer


class Time:
    """Time that passes where a test says so, so that a busy machine changes no share."""

    now = 0.0


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.state.progress.perf_counter", lambda: Time.now)


class Works(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Time.now += 0.05


class Slow(Diary):
    def __getitem__(self, index: int) -> dict[str, Any]:
        Time.now += 0.05
        return super().__getitem__(index)


def test_slow_data_is_said_once_with_advice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, train_dataset=Slow(data.vectors(26)), logging_steps=6, num_train_epochs=2)
    with caplog.at_level("WARNING", "trainwright.run.console"):
        trainer.train()
    said = [record.getMessage() for record in caplog.records if record.name == "trainwright.run.console"]
    assert len(said) == 1
    assert "Raise dataloader_num_workers, which is 0" in said[0]
    assert "loss" in trainer.state.log_history[0]
    assert not any("wait" in key for entry in trainer.state.log_history for key in entry)


def test_quick_data_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "trainwright.run.console"):
        make_trainer(tmp_path, num_train_epochs=1, callbacks=[Works]).train()
    assert "Training waited" not in caplog.text


def test_a_look_begins_anew() -> None:
    clock = Clock()
    wait = DataWait(clock)
    clock.mark(DATA)
    Time.now += 0.01
    clock.mark(OTHER)
    assert 0 < wait.tell(num_steps=2, num_workers=0) <= 1
    assert wait.tell(num_steps=2, num_workers=0) == 0.0
