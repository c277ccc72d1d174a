"""Batches come by torch's public iterator: whatever is put in the place of a dataloader's methods is what runs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainwright import Trainer
from trainwright.data.prepared_dataloader import PreparedDataLoader

from .._support.small import data, differing, make_trainer, trained_trainer, weights

ONE: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "no", "report_to": "none"}


def zeroed(batches: Iterator[Any]) -> Iterator[Any]:
    return ({**batch, "x": torch.zeros_like(batch["x"])} for batch in batches)


class OfZeros(Dataset[Any]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = data.vectors(26)[index]
        return {**item, "x": torch.zeros_like(item["x"])}


class Subclassed(Trainer):
    """The trainer's own dataloader, of a subclass with another `__iter__`."""

    def get_train_dataloader(self) -> Any:
        dataloader = super().get_train_dataloader()
        kind = type(dataloader)

        def batches(self: Any) -> Iterator[Any]:
            return zeroed(kind.__iter__(self))

        dataloader.__class__ = type("Zeroed", (kind,), {"__iter__": batches})
        return dataloader


@pytest.mark.parametrize("of", ["torch's class", "our class", "a subclass", "torch's iterator"])
def test_a_replaced_iteration_is_the_one_that_trains(of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained_trainer(tmp_path / "zeros", train_dataset=OfZeros(), **ONE)
    if of == "torch's iterator":
        iterator = type(iter(DataLoader([1])))
        following = iterator.__next__

        def zeroed_next(self: Any) -> Any:
            return next(zeroed(iter([following(self)])))

        monkeypatch.setattr(iterator, "__next__", zeroed_next)
    elif of != "a subclass":
        kind: Any = DataLoader if of == "torch's class" else PreparedDataLoader
        iterate = kind.__iter__
        monkeypatch.setattr(kind, "__iter__", lambda self: zeroed(iterate(self)))
    cls = Subclassed if of == "a subclass" else None
    trainer = make_trainer(tmp_path / "run", cls=cls, train_dataset=data.vectors(26), **ONE)
    trainer.train()
    assert trainer.state.global_step == expected.state.global_step == 7
    assert differing(weights(trainer.model), weights(expected.model)) == {}


class FailsLate(OfZeros):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9:
            raise ValueError("not this one")
        return super().__getitem__(index)


@pytest.mark.process
def test_workers_end_with_the_error_of_one_of_them(tmp_path: Path) -> None:
    """The error is still held: nothing waits for its traceback to be collected."""
    before = set(multiprocessing.active_children())
    trainer = make_trainer(tmp_path, train_dataset=FailsLate(), dataloader_num_workers=2, **ONE)
    with pytest.raises(ValueError, match="not this one") as raised:
        trainer.train()
    assert set(multiprocessing.active_children()) <= before
    assert raised.value.__traceback__ is not None
