"""The epochs that a stream's log shows, beside the original's: they differ only if a pass ends before its length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import trainwright

from .._support.small import OURS, REFERENCE, Side, StopAt, data, make_trainer


class Sized(data.Stream):
    """Claims a length, which may be wrong."""

    def __init__(self, items: Any, length: int) -> None:
        super().__init__(items)
        self.length = length

    def __len__(self) -> int:
        return self.length


class OwnLoader(trainwright.Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


def epochs(folder: Path, length: int | None, side: Side = OURS, cls: Any = None, **settings: Any) -> list[float]:
    """The epochs in the log of a run over 16 samples, four batches, and the one that its state ends with."""
    rows = data.vectors(16)
    dataset = data.Stream(rows) if length is None else Sized(rows, length)
    trainer = make_trainer(folder, side, cls, train_dataset=dataset, **settings)
    trainer.train()
    logged = [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
    return [*logged, trainer.state.epoch]


BY_QUARTERS = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.0]
TOO_LONG = [1 / 16, 2 / 16, 3 / 16, 1.0, 1 + 1 / 16, 1 + 2 / 16, 1 + 3 / 16, 2.0, 2.0]
WINDOWS: dict[str, Any] = {"gradient_accumulation_steps": 3}
ROWS = [
    # length, settings, epochs, is it the same in the original
    (16, {}, BY_QUARTERS, True),
    (16, {"max_steps": 5}, [*BY_QUARTERS[:5], 1.25], True),
    (15, {"dataloader_drop_last": True}, [1 / 3, 2 / 3, 1.0, 4 / 3, 5 / 3, 2.0, 2.0], False),
    (None, {"max_steps": 8}, [1 / 8, 2 / 8, 3 / 8, 4 / 8, 1 + 1 / 8, 1 + 2 / 8, 1 + 3 / 8, 1.5, 1.5], True),
    (8, {}, [0.5, 1.0, 1.5, 2.0, 2.0], True),
    (64, {}, TOO_LONG, False),
    (64, {"dataloader_drop_last": True}, TOO_LONG, False),
    (64, {"max_steps": 4}, [*TOO_LONG[:4], 1.0], False),
    (64, WINDOWS, [3 / 16, 1.0, 1 + 3 / 16, 2.0, 2.0], False),
]


@pytest.mark.parametrize(("length", "settings", "expected"), [row[:3] for row in ROWS])
def test_a_pass_that_has_ended_is_an_epoch(
    length: int | None, settings: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    assert epochs(tmp_path, length, **settings) == pytest.approx(expected)


def test_so_where_the_next_batch_is_asked_for_after_the_step(tmp_path: Path) -> None:
    logged = epochs(tmp_path, 64, cls=OwnLoader, eval_dataset=data.vectors(4), eval_strategy="epoch")
    assert logged == pytest.approx([*TOO_LONG[:3], 4 / 16, *TOO_LONG[4:7], 1 + 4 / 16, 2.0])


@pytest.mark.parametrize("workers", [1])
def test_so_with_workers(workers: int, tmp_path: Path) -> None:
    assert epochs(tmp_path, 64, dataloader_num_workers=workers) == pytest.approx(TOO_LONG)


def test_a_resume_logs_the_same_epochs(tmp_path: Path) -> None:
    whole = epochs(tmp_path / "whole", 64)
    epochs(tmp_path / "cut", 64, callbacks=[StopAt(4)])
    trainer = make_trainer(tmp_path / "cut", train_dataset=Sized(data.vectors(16), 64))
    trainer.train(resume_from_checkpoint=True)
    assert [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry] == whole[:-1]


@pytest.mark.framework
@pytest.mark.parametrize(("length", "settings", "is_same"), [(row[0], row[1], row[3]) for row in ROWS])
def test_transformers_logs_parts_of_the_length(
    length: int | None, settings: dict[str, Any], is_same: bool, tmp_path: Path
) -> None:
    theirs = epochs(tmp_path / "theirs", length, REFERENCE, **settings)
    assert (epochs(tmp_path / "ours", length, **settings) == theirs) is is_same
    assert epochs(tmp_path / "reproduced", length, **settings, reproduce="transformers") == theirs
