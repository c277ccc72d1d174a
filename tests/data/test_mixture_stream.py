"""Streams and datasets with a length in one mixture: shares, passes, exact resumes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from trainwright import Trainer
from trainwright.data.mixture import as_mixture
from trainwright.errors import ArgumentError, DataError

from .._support.small import Item, StopAt, data, make_trainer, module

SHARES = {"table": 0.5, "plain": 0.3, "hf": 0.2}
BY_STEPS = [(0, SHARES), (8, {"table": 0.0, "plain": 0.5, "hf": 0.5})]


class Stream(IterableDataset[Item]):
    """A stream without a state of its own."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)


class Recorder(Trainer):
    """Remembers which samples are trained: their first number is their index."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[int] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.seen += [round(float(row[0])) for row in inputs["x"]]
        return super().training_step(model, inputs, num_items_in_batch)


def sources() -> dict[str, Any]:
    """Indices 0 to 9, 10 to 21 and 22 to 41."""
    items = [
        {"x": [float(i), *item["x"][1:].tolist()], "labels": item["labels"]} for i, item in enumerate(data.vectors(42))
    ]
    return {"table": items[:10], "plain": Stream(items[10:22]), "hf": data.hf_dataset(items[22:]).to_iterable_dataset()}


def trained(folder: Path, *, stop_at: int = 999, resume: Any = None, **settings: Any) -> Recorder:
    settings = {"max_steps": 24, "model": module(0.0), "train_dataset": sources(), **settings}
    trainer: Any = make_trainer(folder, cls=Recorder, callbacks=[StopAt(stop_at)], **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer  # type: ignore[no-any-return]


def owners(seen: list[int]) -> Counter[str]:
    return Counter("table" if index < 10 else "plain" if index < 22 else "hf" for index in seen)


@pytest.mark.parametrize(
    "asked", [{"mixture": SHARES}, {"mixture_schedule": BY_STEPS}, {}], ids=["shares", "schedule", "union"]
)
def test_a_resume_is_exact(asked: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    whole = trained(tmp_path / "whole", **asked).seen
    first = trained(tmp_path / "two", stop_at=6, **asked).seen
    second = trained(tmp_path / "two", resume=True, **asked).seen
    assert first + second == whole
    if asked:
        other = trained(tmp_path / "two", resume=str(tmp_path / "two" / "checkpoint-6"), **asked,
                        per_device_train_batch_size=2).seen  # fmt: skip
        assert other[:24] == whole[24:48], "until the epoch of 24 batches ends, after which a stream begins again"
        assert owners(whole[:30]) == {"table": 15, "plain": 9, "hf": 6}
    else:
        assert sorted(whole[:42]) == [*range(42)], "each item once in an epoch"


def test_sources_that_end_begin_again_in_another_order(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    seen = trained(tmp_path, mixture=SHARES, max_steps=12).seen
    table = [index for index in seen if index < 10]
    assert sorted(table[:10]) == sorted(table[10:20]) == [*range(10)]
    assert table[:10] != table[10:20]
    assert [index for index in seen if 10 <= index < 22] == [*range(10, 22), 10, 11, 12][: owners(seen)["plain"]]


@pytest.mark.process
def test_workers_take_turns(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    one, two = (trained(tmp_path / str(n), mixture=SHARES, max_steps=9, dataloader_num_workers=n).seen for n in (0, 2))
    assert one == two


def test_what_a_stream_cannot_be_asked(tmp_path: Path) -> None:
    streams = {"a": Stream(data.vectors(4)), "b": data.vectors(4)}
    for said, settings in (
        ("Set max_steps", {"max_steps": -1, "lr_scheduler_type": "constant", "mixture": {"a": 0.5, "b": 0.5}}),
        ("shares of samples", {"max_steps": 4, "mixture": {"a": "all", "b": 0.5}}),
        ("no share for 'b'", {"max_steps": 4, "mixture": {"a": 1}}),
    ):
        with pytest.raises((DataError, ArgumentError), match=said):
            make_trainer(tmp_path, train_dataset=streams, **settings).train()
    empty: Any = as_mixture({"a": Stream([]), "b": Stream(data.vectors(2))})
    with pytest.raises(DataError, match="'a' of train_dataset gave no item"):
        list(itertools.islice(empty, 3))
    with pytest.raises(DataError, match="sources b"):
        empty.load_state_dict({"places": {"b": {}}})
