"""Several named datasets trained on together: which row an index is, and in which order the rows come."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from trainwright import Trainer
from trainwright.capabilities.mixture.dataset import MixtureDataset, as_mixture
from trainwright.capabilities.mixture.order import Breakpoint, ShareCurve
from trainwright.capabilities.mixture.stream import MixtureStream
from trainwright.data.length_sampler import sample_lengths
from trainwright.errors import ArgumentError, DataError

from ..._support.small import Diary, data, make_trainer, module


class AtOnce(list[Any]):
    """Rows that are asked for several at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [f"{self[index]}!" for index in indices]


def test_a_global_index_is_a_row_of_a_source() -> None:
    mixed = MixtureDataset({"code": ["a", "b"], "none": [], "chat": AtOnce("cde"), "last": []})
    assert (len(mixed), mixed.names, mixed.offsets) == (5, ["code", "none", "chat", "last"], [0, 2, 2, 5])
    assert [mixed.find_source(index) for index in range(5)] == [
        ("code", 0),
        ("code", 1),
        ("chat", 0),
        ("chat", 1),
        ("chat", 2),
    ]
    assert [mixed[index] for index in range(5)] == [*"abcde"]
    assert mixed.__getitems__([3, 0, 2, 1, 3]) == ["d!", "a", "c!", "b", "d!"]
    for index in (5, -1):
        with pytest.raises(IndexError):
            mixed[index]


def test_a_dict_becomes_a_mixture_unless_it_is_a_dataset_itself() -> None:
    datasets = pytest.importorskip("datasets")
    by_number = {0: "a", 1: "b"}
    assert as_mixture(by_number) is by_number
    assert as_mixture({"code": ["a"]}).names == ["code"]
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]})})
    for wrong, said in ((splits, "one of them"), ({}, "at least one"), ({"code": iter([])}, "'code'")):
        with pytest.raises(DataError, match=said):
            as_mixture(wrong)


def test_a_dict_stays_one_for_a_dataloader_of_ones_own(tmp_path: Path) -> None:
    """As sentence-transformers and trainers of several tasks have it."""

    class OneAfterTheOther(Trainer):
        def get_train_dataloader(self) -> Any:
            rows = [row for name in self.train_dataset for row in self.train_dataset[name]]
            return DataLoader(rows, batch_size=4, collate_fn=self.data_collator)

    datasets = pytest.importorskip("datasets")
    items = [{**item, "x": item["x"].tolist()} for item in data.vectors(8)]
    splits = datasets.DatasetDict({"one": data.hf_dataset(items[:3]), "two": data.hf_dataset(items[3:])})
    trainer = make_trainer(tmp_path, cls=OneAfterTheOther, train_dataset=splits, num_train_epochs=1)
    assert trainer.train_dataset is splits
    assert trainer.train().global_step == 2
    with pytest.raises(ArgumentError, match="get_train_dataloader is overridden"):
        make_trainer(tmp_path, cls=OneAfterTheOther, train_dataset=splits, mixture={"one": 1, "two": 2})


def test_lengths_are_those_of_the_sources() -> None:
    pytest.importorskip("datasets")
    items = [{"input_ids": [0] * (1 + i)} for i in range(4)]
    mixed = MixtureDataset({"list": items[:3], "table": data.hf_dataset(items)})
    assert sample_lengths(mixed, "input_ids").tolist() == [1, 2, 3, 1, 2, 3, 4]


def test_a_union_trains_as_the_sources_one_after_the_other_do(tmp_path: Path) -> None:
    """In an ordinary shuffled order, columns that the model does not take included."""
    pytest.importorskip("datasets")
    items = [{**item, "x": item["x"].tolist()} for item in data.vectors(26)]
    table = data.hf_dataset(items[16:], text=["t"] * 10)
    diary = Diary(items[:16])
    mixed = make_trainer(tmp_path / "mixed", train_dataset={"list": diary, "table": table}, model=module(0.0))
    plain = make_trainer(tmp_path / "plain", train_dataset=items, model=module(0.0))
    assigned = make_trainer(tmp_path / "assigned", train_dataset=items[:1], model=module(0.0))
    assigned.train_dataset = {"list": items[:16], "table": table}
    for trainer in (mixed, plain, assigned):
        trainer.train()
    assert isinstance(mixed, Trainer)
    assert sorted(diary.reads) == sorted([*range(16)] * 2)
    losses, of_mixed, of_assigned = (
        [entry.get("loss") for entry in trainer.state.log_history] for trainer in (plain, mixed, assigned)
    )
    assert losses == of_mixed == of_assigned


def test_shares_of_a_dict_that_is_assigned_are_checked_before_step_1(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=None, mixture={"code": 1, "chat": 2})
    trainer.train_dataset = {"code": data.vectors(4), "chats": data.vectors(4)}
    with pytest.raises(ArgumentError, match="'chat'"):
        trainer.train()
    assert trainer.state.global_step == 0


FORMER_PATHS = {
    "data.mixture": MixtureDataset({"a": [1, 2], "b": [3]}),
    "data.streaming.mixture_stream": MixtureStream({"a": [1, 2], "b": [3]}),
    "data.mixture_order": ShareCurve((Breakpoint(0, (0.5, 0.5), (0.5, 0.5)),)),
}


@pytest.mark.parametrize("former", FORMER_PATHS)
def test_a_pickle_that_names_the_former_module_loads(former: str) -> None:
    kept = FORMER_PATHS[former]
    written = pickle.dumps(kept, protocol=0)
    now = type(kept).__module__.encode()
    assert now in written
    loaded = pickle.loads(written.replace(now, f"trainwright.{former}".encode()))
    assert type(loaded) is type(kept)
    assert vars(loaded).keys() == vars(kept).keys()


def test_a_former_module_has_no_other_names() -> None:
    module = importlib.import_module("trainwright.data.mixture")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
