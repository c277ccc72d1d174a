"""A run stays where it began, wherever the working directory changes; `output_dir` keeps the value that was given."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright import Trainer, TrainerCallback, TrainingArguments
from trainwright.checkpoint.async_writer import failures_named
from trainwright.errors import CheckpointWriteError

from .._support.small import SETTINGS, data, module

EVENTS = ("on_train_begin", "on_epoch_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end")
PHASES = ("never", "arguments", "trainer", *EVENTS, "trained", "resume")


def go(folder: Path) -> Callable[..., None]:
    def change(*args: Any, **kwargs: Any) -> None:
        os.chdir(folder)

    return change


@pytest.mark.parametrize("save_async", [None, True], ids=["blocking", "behind"])
@pytest.mark.parametrize("phase", PHASES)
def test_everything_is_written_to_one_directory(
    phase: str, save_async: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    elsewhere = tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)

    def reach(name: str) -> None:
        if name == phase:
            os.chdir(elsewhere)

    settings = SETTINGS | {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    settings |= {"num_train_epochs": 1, "use_cpu": True, "report_to": "none", "load_best_model_at_end": True}
    args = TrainingArguments("runs/out", save_async=save_async, **settings)
    reach("arguments")
    rows = data.vectors(26)
    Moves = type("Moves", (TrainerCallback,), {phase: go(elsewhere)} if phase in EVENTS else {})
    trainer = Trainer(module(), args, train_dataset=rows, eval_dataset=rows[:4], callbacks=[Moves()])
    reach("trainer")
    trainer.train()
    reach("trained")
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"train_loss": 1.0})
    reach("resume")
    args.num_train_epochs = 2
    assert trainer.train(resume_from_checkpoint=True).global_step == 14
    assert (args.output_dir, args.to_dict()["output_dir"]) == ("runs/out", "runs/out")
    assert list(elsewhere.iterdir()) == []
    names = {path.name for path in (here / "runs" / "out").iterdir()}
    expected = {f"checkpoint-{step}" for step in (3, 6, 7, 9, 12, 14)}
    assert names >= {*expected, "model.safetensors", "trainer_state.json", "train_results.json"}
    assert Path(trainer.state.best_model_checkpoint).is_dir()


def test_a_value_assigned_later_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = TrainingArguments("one", use_cpu=True, report_to="none")
    args.output_dir = "two"
    trainer = Trainer(module(), args, train_dataset=data.vectors(4))
    trainer.save_model()
    assert (tmp_path / "two" / "model.safetensors").is_file()
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "Make room"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "Make room"),
        (RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)"), "Make room"),
        (MemoryError(), "Free memory"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "what removes or replaces that directory"),
        (PermissionError(errno.EACCES, "Permission denied"), "the right to write there"),
        (OSError(errno.EROFS, "Read-only file system"), "the right to write there"),
        (OSError(errno.EIO, "Input/output error"), "why the disk refuses it"),
    ],
)
def test_only_a_full_disk_needs_room(error: Exception, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match=says) as raised, failures_named(tmp_path):
        raise error
    assert ("Make room" in str(raised.value)) is (says == "Make room")
