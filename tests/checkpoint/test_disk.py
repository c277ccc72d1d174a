"""A disk that is full, or too small from the start."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.checkpoint import async_writer
from trainwright.checkpoint.store import CheckpointStore, verified
from trainwright.errors import CheckpointWriteError

from .._support import forked
from .._support.small import StopAt, data, make_trainer, models

SAVING = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 1}

# A limit on the size of a file is what a process can bring about by itself; writing beyond it fails as on a full disk.
SCRIPT = """
import json, resource, sys, time
from pathlib import Path
import torch
from trainwright import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(100, 400)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).pow(2).mean()}

class Fills(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            while not (Path(args.output_dir) / "checkpoint-2").exists():  # it may be on its way
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

found = {}
for name, settings in json.loads(sys.argv[2]).items():
    folder = Path(sys.argv[1]) / name
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, disable_tqdm=True, save_steps=2, max_steps=6,
                             per_device_train_batch_size=1, **settings)
    trainer = Trainer(model=Model(), args=args, train_dataset=[{"x": torch.ones(100)}] * 6, callbacks=[Fills()])
    try:
        trainer.train()
        error = None
    except OSError as caught:
        error = f"{type(caught).__name__}: {caught}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found[name] = [trainer.state.global_step, error]
print(json.dumps(found))
"""
CASES = {
    "behind-stop": {},
    "at-once-stop": {"save_async": False},
    "behind-continue": {"save_failure": "continue"},
    "at-once-continue": {"save_async": False, "save_failure": "continue"},
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("filled")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    done = forked.run(["-c", SCRIPT, str(folder), json.dumps(CASES)], env=environment, timeout=110)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX's")
@pytest.mark.parametrize("name", CASES)
def test_a_full_disk_leaves_the_older_checkpoints_whole(name: str, filled: tuple[Path, dict[str, Any]]) -> None:
    root, found = filled
    steps, error = found[name]
    store = CheckpointStore(root / name)
    assert store.steps() == [2]
    assert str(store.latest()) == str(verified(store.path(2)))
    assert [path.name for path in store.root.iterdir() if path.name.startswith(".")] == []
    if name.endswith("continue"):
        assert (steps, error) == (6, None)
    else:
        assert steps == (4 if name.startswith("at-once") else 6)  # an error behind training's back waits for a save
        assert error.startswith("CheckpointWriteError: A checkpoint could not be written to")
        assert "Earlier checkpoints are untouched" in error


def with_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))


def weights_of(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_too_small_a_disk_is_said_before_step_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SAVING)
    with_free(monkeypatch, weights_of(trainer.model) - 1)
    with pytest.raises(CheckpointWriteError, match=r"needs at least .*B, but .*B are free at .*save_only_model"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_nothing_is_said_where_nothing_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_free(monkeypatch, 0)
    trainer = make_trainer(tmp_path, num_train_epochs=1, save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 7


def test_a_disk_that_is_probably_too_small_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, **SAVING, save_failure="continue")
    with_free(monkeypatch, 2 * weights_of(trainer.model))
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer.train()
    assert "estimated with its optimizer, needs at least" in caplog.text
    assert "The next checkpoint needs at least" in caplog.text  # with the optimizer as it is after the first step
    assert (trainer.state.global_step, CheckpointStore(tmp_path).steps()) == (7, [])


def test_before_a_save_nothing_is_written_that_cannot_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_trainer(tmp_path, **SAVING, callbacks=[StopAt(4)]).train()
    trainer = make_trainer(tmp_path, **SAVING)
    with_free(monkeypatch, 2 * weights_of(trainer.model))
    with pytest.raises(CheckpointWriteError, match="The next checkpoint needs at least"):
        trainer.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "journal.jsonl"]


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    """What is asked for must never be more than what is written."""
    for name, model in (("plain", None), ("tied", models.seeded(models.gpt2))):
        parts = {} if model is None else {"model": model, "train_dataset": data.sequences(26)}
        trainer = make_trainer(tmp_path / name, **SAVING, callbacks=[StopAt(1)], **parts)
        trainer.train()
        folder = tmp_path / name / "checkpoint-1"
        written = (folder / "model.safetensors").stat().st_size
        assert 0.5 * written < async_writer.weights_bytes(trainer.model) <= written
        written = (folder / "optimizer.pt").stat().st_size
        assert 0.1 * written < async_writer.optimizer_bytes(trainer.optimizer) <= written
        assert async_writer.estimated_optimizer_bytes(trainer.model) <= written
