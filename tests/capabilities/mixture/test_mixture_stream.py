"""Streams and datasets with a length in one mixture: shares, passes, exact resumes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from trainwright import Trainer
from trainwright.capabilities.mixture.dataset import as_mixture
from trainwright.capabilities.quarantine.file import add_to_quarantine
from trainwright.errors import ArgumentError, DataError

from ..._support.small import Item, StopAt, data, make_trainer, module
from ..._support.two_processes import run, tell
from ..ledger import test_ledger as ledgers

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
    return Counter(owner(index) for index in seen)


def owner(index: int) -> str:
    if index < 10:
        return "table"
    return "plain" if index < 22 else "hf"


@pytest.mark.parametrize(
    "asked", [{"mixture": SHARES}, {"mixture_schedule": BY_STEPS}, {}], ids=["shares", "schedule", "union"]
)
def test_a_resume_is_exact(asked: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    asked["ledger"] = True
    whole = trained(tmp_path / "whole", **asked).seen
    first = trained(tmp_path / "two", stop_at=6, **asked).seen
    second = trained(tmp_path / "two", resume=True, **asked).seen
    assert first + second == whole
    one, other = (ledgers.rows_in(tmp_path / name) for name in ("whole", "two"))
    assert all(np.array_equal(one[name], other[name]) for name in one if name != "about")
    if len(asked) > 1:
        other = trained(
            tmp_path / "two", resume=str(tmp_path / "two" / "checkpoint-6"), **asked, per_device_train_batch_size=2
        ).seen
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
    with pytest.raises(DataError, match="'a' of train_dataset has no items"):
        list(itertools.islice(empty, 3))
    with pytest.raises(DataError, match="sources b"):
        empty.load_state_dict({"places": {"b": {}}})


TOKENS = {
    "packed": {"packing": "best_fit", "packing_length": 16},
    "": {},
    "budget": {"max_tokens_per_batch": 24, "per_device_train_batch_size": 8},
}


@pytest.mark.parametrize(
    ("workers", "forms", "asked"),
    [(0, "", SHARES), (0, "packed", SHARES), (0, "", None), (2, "budget", SHARES), (2, "", None)],
)
def test_the_log_and_the_ledger_know_the_source_of_each_sample(
    workers: int, forms: str, asked: dict[str, float] | None, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    settings: dict[str, Any] = {"mixture": asked, "dataloader_num_workers": workers, "ledger": True, **TOKENS[forms]}
    if forms:
        rows = ledgers.texts([3 + number % 6 for number in range(42)])
        hf = data.hf_dataset(rows[22:]).to_iterable_dataset()
        settings |= {
            "train_dataset": {"table": rows[:10], "plain": Stream(rows[10:22]), "hf": hf},
            "model": ledgers.gpt2(),
            "cls": Trainer,
            "data_collator": ledgers.padded,
        }
        settings |= {"data_collator": None} if forms == "packed" else {}
    settings = {
        "max_steps": 8 if asked else -1,
        "num_train_epochs": 1,
        "lr_scheduler_type": "constant",
        "model": module(0.0),
        "cls": Recorder,
        "train_dataset": sources(),
        **settings,
    }
    one: Any = make_trainer(tmp_path, **settings)
    one.train()
    found = ledgers.rows_in(tmp_path)
    for step, entry in enumerate(one.state.log_history[:-1], start=1):
        names = [name.removeprefix("samples/") for name in entry if name.startswith("samples/")]
        num = sum(entry[f"tokens/{name}"] for name in names)
        whole = sum(entry[f"tokens/{name}"] * entry[f"loss/{name}"] for name in names)
        assert whole / num == pytest.approx(entry["loss"], abs=1e-6)
        if not forms:
            trained = owners(one.seen[4 * step - 4 : 4 * step])
            assert {name: entry[f"samples/{name}"] for name in names} == trained
    firsts = {"table": 0, "plain": 10, "hf": 22}
    indices = [firsts[name] + row for name, row in zip(found["source"], found["row"], strict=True)]
    visited = dict(zip(indices, found["visits"], strict=True))
    if forms:
        assert set(visited) <= set(range(42))
    else:
        assert visited == Counter(one.seen), "rows of a table by index, those of a stream by place"
        assert asked or set(visited.values()) == {1}
    assert found["about"]["sources"] == {"table": 10, "plain": None, "hf": None}


def test_samples_are_left_out_by_the_numbers_of_the_ledger(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    add_to_quarantine(tmp_path, [4 * 3 + 0, 5 * 3 + 1, 0 * 3 + 2])  # row times the number of sources, and the source
    seen = trained(tmp_path, max_steps=10).seen
    assert sorted(seen[:39]) == sorted({*range(42)} - {4, 10 + 5, 22})


def test_what_the_ledger_of_a_stream_cannot_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("datasets")
    parts = sources()
    parts["hf"] = parts["hf"].shuffle(seed=0, buffer_size=4)
    one = trained(tmp_path, train_dataset=parts, max_steps=2, ledger=True, log_level="warning")
    assert sum("a stream of the mixture is shuffled" in record.message for record in caplog.records) == 1
    assert not (tmp_path / "ledger.parquet").exists()
    assert one.state.log_history[0]["samples/hf"] >= 1
    with pytest.raises(DataError, match="the training data is a stream"):
        trained(tmp_path, max_steps=2, ledger="name")


def of_two_ranks(folder: str) -> None:
    one = trained(
        Path(folder), mixture=SHARES, max_steps=6, ledger=True, dataloader_num_workers=2, per_device_train_batch_size=3
    )
    tell(seen=one.seen, log=one.state.log_history[:6])


@pytest.mark.slow  # two processes with two workers each, of a part that the quick tests and those of rows show
def test_two_processes_know_the_sources(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom tests.capabilities.mixture.test_mixture_stream import of_two_ranks\nof_two_ranks(sys.argv[1])"
    )
    told = run(script, str(tmp_path / "out"), folder=tmp_path).told
    found = ledgers.rows_in(tmp_path / "out")
    log = told[0]["log"]
    assert sum(owners([*told[0]["seen"], *told[1]["seen"]]).values()) == 36 == found["visits"].sum()
    for name, num in owners([*told[0]["seen"], *told[1]["seen"]]).items():
        assert num == found["visits"][found["source"] == name].sum() == sum(one[f"samples/{name}"] for one in log)
    for one in log:
        names = [name.removeprefix("samples/") for name in one if name.startswith("samples/")]
        whole = sum(one[f"tokens/{name}"] * one[f"loss/{name}"] for name in names)
        assert whole / sum(one[f"tokens/{name}"] for name in names) == pytest.approx(one["loss"], abs=1e-6)
