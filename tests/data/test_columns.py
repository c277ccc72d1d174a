"""Columns: those that `forward` takes reach the collator; the others are dropped, and that is said once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from transformers import default_data_collator

from trainwright import RemoveColumnsCollator
from trainwright.data.columns import is_columnar, remove_unused
from trainwright.errors import DataError

from .._support.small import data, make_trainer

ITEMS = [{"x": 1, "labels": 0, "text": "a", "index": 7}, {"x": 2, "labels": 1, "text": "b", "index": 8}]


def keep(features: list[Any]) -> list[Any]:
    return features


def test_entries_that_are_not_taken_are_dropped_before_the_collator() -> None:
    assert RemoveColumnsCollator(keep, ["x", "labels"])(ITEMS) == [{"x": 1, "labels": 0}, {"x": 2, "labels": 1}]
    assert ITEMS[0].keys() == {"x", "labels", "text", "index"}, "the user's samples stay as they are"


def test_what_is_no_dict_goes_through() -> None:
    assert RemoveColumnsCollator(keep, ["x"])([(1, 2), "text"]) == [(1, 2), "text"]


def test_what_is_dropped_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("trainwright.data.columns")
    collate = RemoveColumnsCollator(keep, ["x", "labels"], logger, "Net", "Training")
    with caplog.at_level(logging.INFO, logger=logger.name):
        for _ in range(3):
            collate(ITEMS)
    (said,) = caplog.messages
    for word in ("Net", "training", "text, index", "remove_unused_columns=False"):
        assert word in said


def test_columns_are_removed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    dataset = data.hf_dataset(ITEMS)
    assert is_columnar(dataset)
    assert not is_columnar(ITEMS)
    with caplog.at_level(logging.INFO, logger="trainwright.data.columns"):
        left = remove_unused(dataset, ["labels", "x", "y"], model_name="Net", description="Evaluation")
    assert left.column_names == ["x", "labels"]
    assert "text, index" in caplog.text
    assert dataset.column_names == ["x", "labels", "text", "index"]


def test_no_column_left_is_an_error() -> None:
    with pytest.raises(DataError, match=r"x, labels, text, index.*Net\.forward \(a, b\).*remove_unused_columns=False"):
        remove_unused(data.hf_dataset(ITEMS), ["a", "b"], model_name="Net", description="Training")


# -- through a trainer -----------------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.linear(x[:, None].float()), labels)}


class TakesAnything(Linear):
    seen: list[set[str]] = []  # noqa: RUF012

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        self.seen.append({*batch})
        return super().forward(batch["x"], batch["labels"])


class Spy:
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        self.seen |= {name for item in features for name in item}
        return default_data_collator([{k: v for k, v in item.items() if k != "text"} for item in features])


@pytest.mark.parametrize("wrap", [list, data.hf_dataset, data.TorchDataset], ids=["list", "columns", "torch"])
def test_the_collator_sees_what_forward_takes(wrap: Any, tmp_path: Path) -> None:
    spy = Spy()
    trainer = make_trainer(tmp_path, model=Linear(), train_dataset=wrap(ITEMS), eval_dataset=wrap(ITEMS),
                           data_collator=spy)  # fmt: skip
    trainer.train()
    trainer.evaluate()
    assert spy.seen == {"x", "labels"}


@pytest.mark.parametrize("wrap", [list, data.hf_dataset], ids=["list", "columns"])
def test_everything_is_kept_where_asked_for(wrap: Any, tmp_path: Path) -> None:
    spy = Spy()
    with pytest.raises(TypeError, match="index"):  # the model does not take it: the user asked for it
        make_trainer(tmp_path, model=Linear(), train_dataset=wrap(ITEMS), data_collator=spy,
                     remove_unused_columns=False).train()  # fmt: skip
    assert spy.seen == {"x", "labels", "text", "index"}


@pytest.mark.parametrize("wrap", [list, data.hf_dataset], ids=["list", "columns"])
def test_a_model_that_takes_any_keyword_gets_all(wrap: Any, tmp_path: Path) -> None:
    """Its signature names nothing, so nothing may be dropped by it."""
    model = TakesAnything()
    model.seen = []
    make_trainer(tmp_path, model=model, train_dataset=wrap(ITEMS), data_collator=Spy()).train()
    assert model.seen[0] >= {"x", "labels", "index"}


def test_the_older_names_of_labels_are_kept(tmp_path: Path) -> None:
    items = [{"x": 1, "label": 0}, {"x": 2, "label": 1}]
    trainer = make_trainer(tmp_path, model=Linear(), train_dataset=data.hf_dataset(items))
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_transform_on_the_fly_gets_the_columns_it_reads(tmp_path: Path) -> None:
    """The model takes none of them; what the transform makes of them is what it takes, and the rest is dropped."""
    raw = datasets.Dataset.from_dict({"text": [f"{i} {i % 3}" for i in range(12)]})

    def transform(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        pairs = [[int(word) for word in text.split()] for text in batch["text"]]
        return {
            "x": [torch.full((8,), a / 12) for a, _ in pairs],
            "labels": [b for _, b in pairs],
            "text": batch["text"],
        }

    trainer = make_trainer(tmp_path, train_dataset=raw.with_transform(transform), num_train_epochs=1)
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"x", "labels"}
