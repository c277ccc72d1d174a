"""The best checkpoint is loaded at the end only if its files are as they were written; else the next best one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from trainwright import TrainerCallback

from .._support.small import data, make_trainer

SCORES = {2: 3.0, 4: 9.0, 6: 5.0}


class Damages(TrainerCallback):
    def __init__(self, folder: Path, steps: tuple[int, ...]) -> None:
        self.folder = folder
        self.steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state = state

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for step in self.steps if "train_runtime" in logs else ():
            file = self.folder / f"checkpoint-{step}" / "model.safetensors"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)


@pytest.mark.parametrize(
    ("damaged", "loaded"), [((), 4), ((4,), 6), ((4, 6), 2), ((2, 4, 6), None)], ids=lambda value: str(value)
)
def test_the_next_best_takes_the_place_of_a_damaged_one(
    damaged: tuple[int, ...], loaded: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damages = Damages(tmp_path, damaged)
    trainer = make_trainer(
        tmp_path,
        max_steps=7,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        callbacks=[damages],
        eval_dataset=data.vectors(4),
        compute_metrics=lambda _: {"score": SCORES.get(damages.state.global_step)},
        save_async=False,
        log_level="warning",
    )
    damages.state = trainer.state
    trainer.train()
    assert [name for name in caplog.messages if "altered" in name] == [
        message for message in caplog.messages if "is not loaded" in message
    ]
    assert len([message for message in caplog.messages if "altered" in message]) == len(damaged)
    weights = trainer.model.state_dict()
    for step in SCORES:
        saved = safetensors.torch.load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        is_it = all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
        assert is_it == (step == loaded)
    assert ("keeps the last weights" in caplog.text) == (loaded is None)
