"""The user's own objects are what callbacks, workers and hooks get: no reader, and no name, of ours lies in between."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from trainwright import TrainerCallback

from .._support.small import OURS, REFERENCE, Side, StopAt, make_trainer, models

Item = dict[str, Any]
NUM = 8

# -- data that is asked for by its own names --------------------------------------------------------------------------


def item(number: float, level: float = 0.0) -> Item:
    return {"x": torch.full((6,), number / 100 + level), "labels": int(number) % 2}


class Named:
    """Attributes with the names that our readers use."""

    def __init__(self) -> None:
        self.level = 0
        self.seed = 1234
        self.split = "train"
        self.start = 5
        self.share = 0.5
        self.excluded = ["x"]
        self.former = "former"
        self._epoch = 7
        self.source = "source"


NAMES = tuple(vars(Named()))


class Rows(Named, Dataset[Item]):
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Item:
        info = get_worker_info()
        assert info is None or info.dataset is self
        return item(index, self.level)


class Stream(Named, IterableDataset[Item]):
    def __iter__(self) -> Iterator[Item]:
        info: Any = get_worker_info()
        assert info is None or info.dataset is self
        yield from (item(number, self.level) for number in range(NUM))


class Collator:
    temperature = 1.0

    def __call__(self, rows: list[Any]) -> Item:
        if isinstance(rows[0], tuple):
            rows = [dict(zip(("x", "labels"), row, strict=True)) for row in rows]
        return {
            "x": torch.stack([torch.as_tensor(row["x"]) for row in rows]),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }


def columns() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"x": [one / 100] * 6, "labels": one % 2} for one in range(NUM)])


KINDS: dict[str, Callable[[], Any]] = {
    "map": Rows,
    "stream": Stream,
    "list": lambda: [item(number) for number in range(NUM)],
    "subset": lambda: Subset(Rows(), range(NUM)),
    "tensors": lambda: TensorDataset(torch.rand(NUM, 6), torch.arange(NUM) % 2),
    "columns": columns,
    "columns, streamed": lambda: columns().to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=4),
}
WORKERS: dict[str, Item] = {
    "0 workers": {},
    "2 workers": {"dataloader_num_workers": 2},
    "2 persistent workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
}
SETTINGS: dict[str, Item] = {
    "plain": {},
    "seeded samples": {"seed_samples": True},
}


class Looks(TrainerCallback):
    """What is handed out at the events of a run."""

    def __init__(self) -> None:
        self.found: set[tuple[int, int]] = set()

    def _look(self, dataloader: Any) -> None:
        if dataloader is not None:
            self.found.add((id(dataloader.dataset), id(dataloader.collate_fn)))

    def on_train_begin(self, *args: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        self._look(train_dataloader)

    on_step_end = on_train_begin

    def on_evaluate(self, *args: Any, train_dataloader: Any = None, eval_dataloader: Any = None, **kwargs: Any) -> None:
        self._look(train_dataloader)
        self._look(eval_dataloader)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_callbacks_and_calls_get_the_objects_that_were_passed(kind: str, setting: str, tmp_path: Path) -> None:
    own = KINDS[kind]()
    collate = Collator()
    looks = Looks()
    parts: Item = {"train_dataset": own, "eval_dataset": own, "data_collator": collate, "callbacks": [looks]}
    how = {"remove_unused_columns": False, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    trainer = make_trainer(tmp_path, **parts, **how, **SETTINGS[setting])
    for dataloader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader(), trainer.get_test_dataloader(own)):
        assert dataloader.dataset is own
        assert dataloader.collate_fn is collate
    assert trainer.train_dataset is own
    trainer.train()
    assert looks.found == {(id(own), id(collate))}


def test_columns_that_model_does_not_take_leave_dataset_of_the_same_class(tmp_path: Path) -> None:
    own = columns().add_column("more", list(range(NUM)))
    collate = Collator()
    trainer = make_trainer(tmp_path, train_dataset=own, data_collator=collate)
    dataloader = trainer.get_train_dataloader()
    assert type(dataloader.dataset) is datasets.Dataset
    assert dataloader.dataset.column_names == ["x", "labels"]
    assert dataloader.collate_fn is collate


def test_collator_in_a_wrapper_that_drops_columns_is_reached_by_its_names(tmp_path: Path) -> None:
    collate = Collator()
    trainer = make_trainer(tmp_path, train_dataset=Rows(), data_collator=collate)
    wrapper = trainer.get_train_dataloader().collate_fn
    assert wrapper.data_collator is collate
    wrapper.temperature = wrapper.temperature + 1
    assert collate.temperature == 2.0
    wrapper.description = "mine"
    assert not hasattr(collate, "description")


def test_the_collator_of_packed_rows_is_the_users(tmp_path: Path) -> None:
    collate = Collator()
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(NUM)]
    how = {"remove_unused_columns": False, "packing": "best_fit", "packing_length": 16}
    trainer = make_trainer(tmp_path, model=models.llama(), train_dataset=rows, data_collator=collate, **how)
    dataloader = trainer.get_train_dataloader()
    assert dataloader.dataset is rows
    assert dataloader.collate_fn is collate


# -- changes through them ---------------------------------------------------------------------------------------------


class Curriculum(TrainerCallback):
    """Raises the level of the data in each epoch."""

    def __init__(self) -> None:
        self.read: list[Item] = []

    def on_epoch_begin(self, *args: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        inner = train_dataloader.dataset
        self.read.append({name: getattr(inner, name) for name in NAMES})
        inner.level = inner.level + 1


def recording(trainer: Any) -> list[float]:
    """Returns the list of the levels on which a trainer will train."""
    levels: list[float] = []
    step = trainer.training_step

    def training_step(model: Any, inputs: Item, *args: Any) -> Any:
        levels.append(float(inputs["x"][0, 0]) // 1)
        return step(model, inputs, *args)

    trainer.training_step = training_step
    return levels


@pytest.mark.parametrize(
    "side", [OURS, pytest.param(REFERENCE, marks=pytest.mark.framework)], ids=["ours", "transformers"]
)
@pytest.mark.parametrize(
    "workers", ["0 workers", pytest.param("2 workers", marks=pytest.mark.process)], ids=["here", "in workers"]
)
@pytest.mark.parametrize("kind", [Rows, Stream])
def test_a_curriculum_through_the_dataloader_is_trained(kind: Any, workers: str, side: Side, tmp_path: Path) -> None:
    own = kind()
    curriculum = Curriculum()
    how = {"max_steps": 6, "data_collator": Collator(), **WORKERS[workers]}
    if workers == "2 workers" and kind is Stream and side is REFERENCE:
        pytest.skip("each worker of the original gives the whole stream")
    trainer = make_trainer(tmp_path, side, train_dataset=own, callbacks=[curriculum], **how)
    levels = recording(trainer)
    trainer.train()
    assert levels == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert own.level == 3
    assert curriculum.read == [vars(Named()) | {"level": level} for level in range(3)]


@pytest.mark.parametrize("kind", [Rows, Stream])
def test_a_curriculum_goes_on_after_a_resume(kind: Any, tmp_path: Path) -> None:
    how = {"max_steps": 6, "data_collator": Collator(), "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, train_dataset=kind(), callbacks=[Curriculum(), StopAt(3)], **how).train()
    own = kind()
    own.level = 1
    resumed = make_trainer(tmp_path, train_dataset=own, callbacks=[Curriculum()], **how)
    levels = recording(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert levels == [2.0, 3.0, 3.0]


class NextEpoch(TrainerCallback):
    """The callback of transformers' speech examples."""

    def on_epoch_begin(self, *args: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        inner = train_dataloader.dataset
        assert isinstance(inner, IterableDataset)
        inner.set_epoch(inner._epoch + 1)


def test_the_callback_of_the_speech_examples_shuffles_each_epoch(tmp_path: Path) -> None:
    own = columns().to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=8)
    seen: list[float] = []

    def collate(rows: list[Item]) -> Item:
        seen.extend(round(row["x"][0] * 100) for row in rows)
        return Collator()(rows)

    make_trainer(tmp_path, train_dataset=own, data_collator=collate, max_steps=6, callbacks=[NextEpoch()]).train()
    passes = [tuple(seen[first : first + NUM]) for first in range(0, 3 * NUM, NUM)]
    assert len(set(passes)) == 3
    assert {tuple(sorted(one)) for one in passes} == {tuple(range(NUM))}


# -- in workers -------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("workers", ["2 workers", "2 persistent workers"])
@pytest.mark.parametrize("kind", [Rows, Stream])
def test_a_worker_describes_itself_with_the_users_dataset(
    kind: Any, workers: str, setting: str, tmp_path: Path
) -> None:
    """The dataset compares; `get_worker_info().dataset` is our reader otherwise."""
    own = kind()
    parts = {"train_dataset": own, "eval_dataset": own, "data_collator": Collator()}
    trainer = make_trainer(tmp_path, **parts, max_steps=4, **WORKERS[workers], **SETTINGS[setting])
    trainer.train()
    trainer.evaluate()


class Range(IterableDataset[Item]):
    """A part of the numbers, as in torch's documentation."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[Item]:
        return map(item, range(self.start, self.end))


class DividesItself(Range):
    def __iter__(self) -> Iterator[Item]:
        info: Any = get_worker_info()
        if info is None:
            return super().__iter__()
        overall = info.dataset
        size = math.ceil((overall.end - overall.start) / float(info.num_workers))
        first = self.start + info.id * size
        return map(item, range(first, min(first + size, self.end)))


def divide(worker_id: int) -> None:
    info: Any = get_worker_info()
    dataset = info.dataset
    size = math.ceil((dataset.end - dataset.start) / float(info.num_workers))
    first = dataset.start + worker_id * size
    dataset.end = min(first + size, dataset.end)
    dataset.start = first


def trained_numbers(side: Side, folder: Path, kind: type[Range], **how: Any) -> list[list[int]]:
    init = None if kind is DividesItself else divide
    seen: list[list[int]] = []

    class Own(side.trainer):  # type: ignore[name-defined, misc]
        def get_train_dataloader(self) -> Any:
            dataloader = super().get_train_dataloader()
            inside = dataloader.base_dataloader
            if init is not None:
                inside.worker_init_fn = init
            return dataloader

        def training_step(self, model: Any, inputs: Item, *args: Any) -> Any:
            seen.append([round(one * 100) for one in inputs["x"][:, 0].tolist()])
            return super().training_step(model, inputs, *args)

    resume = how.pop("resume_from_checkpoint", None)
    parts = {"train_dataset": kind(0, 16), "data_collator": Collator(), "max_steps": 8}
    trainer = make_trainer(folder, side, Own, **parts, **how, save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=resume)
    return seen


@pytest.mark.process
@pytest.mark.framework
@pytest.mark.parametrize("workers", ["2 workers", "2 persistent workers"])
@pytest.mark.parametrize("kind", [DividesItself, Range], ids=["in __iter__", "in worker_init_fn"])
def test_a_stream_divided_as_torch_documents_it_is_trained_once(kind: Any, workers: str, tmp_path: Path) -> None:
    ours = trained_numbers(OURS, tmp_path / "ours", kind, **WORKERS[workers])
    theirs = trained_numbers(REFERENCE, tmp_path / "theirs", kind, **WORKERS[workers])
    assert ours == theirs
    assert sorted(one for batch in ours for one in batch) == sorted([*range(16)] * 2)


@pytest.mark.process
@pytest.mark.parametrize("kind", [DividesItself, Range], ids=["in __iter__", "in worker_init_fn"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_stream_divided_so_resumes_where_it_was(kind: Any, stop: int, tmp_path: Path) -> None:
    how = WORKERS["2 workers"]
    whole = trained_numbers(OURS, tmp_path / "whole", kind, **how)
    before = trained_numbers(OURS, tmp_path / "parts", kind, **how, callbacks=[StopAt(stop)])
    after = trained_numbers(OURS, tmp_path / "parts", kind, **how, resume_from_checkpoint=True)
    assert before + after == whole


# -- rows of any type ------------------------------------------------------------------------------------------------


class Opaque:
    """A row that nobody but the collator can read."""


ODD_ROWS = [None, "text", 3, (1, 2), [1], Opaque(), np.float32(1), {"y": 1}]


@pytest.mark.parametrize("odd", ODD_ROWS, ids=lambda row: type(row).__name__)
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_row_of_any_type_reaches_the_collator(odd: Any, streamed: bool, first: bool, tmp_path: Path) -> None:
    rows: list[Any] = [item(number) for number in range(NUM)]
    rows[0 if first else 5] = odd
    found: list[type] = []

    class Given(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(rows)

    def collate(features: list[Any]) -> Item:
        found.extend(type(one) for one in features if not (isinstance(one, dict) and "x" in one))
        return Collator()([one for one in features if isinstance(one, dict) and "x" in one])

    own: Any = Given() if streamed else rows
    parts = {"train_dataset": own, "eval_dataset": own, "data_collator": collate}
    trainer = make_trainer(tmp_path, **parts, max_steps=2, compute_metrics=lambda p: {"rows": len(p.predictions)})
    trainer.train()
    assert trainer.evaluate()["eval_rows"] == NUM - 1
    assert found == [type(odd)] * 2


# -- functions are called as often -------------------------------------------------------------------------------------


class Counts:
    """A metric that remembers its calls; its other methods are its own business."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prediction: Any) -> dict[str, float]:
        self.calls += 1
        return {"calls": float(self.calls)}

    def update(self) -> None:
        raise AssertionError("nobody may call it")

    compute = update


@pytest.mark.parametrize("best", [None, "calls"])
@pytest.mark.parametrize("how", [pytest.param("transformers", marks=pytest.mark.framework), "reproduce", "ours"])
def test_metrics_are_computed_as_often_as_in_the_original(
    how: str, best: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metric = Counts()
    rows = [item(number) for number in range(NUM)]
    parts = {"train_dataset": rows, "eval_dataset": rows, "compute_metrics": metric}
    settings: Item = {
        "log_level": "warning",
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": best,
    }
    if how == "reproduce":
        settings["reproduce"] = "transformers"
    make_trainer(tmp_path, REFERENCE if how == "transformers" else OURS, **parts, **settings).train()
    is_said = "compute_metrics was called once with one batch" in capsys.readouterr().out
    assert (metric.calls, is_said) == ((3, True) if how == "ours" else (2, False))


def test_nothing_is_said_of_metrics_that_were_not_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metric = Counts()
    rows = [item(number) for number in range(NUM)]
    how = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True}
    how |= {"log_level": "warning"}
    make_trainer(tmp_path, train_dataset=rows, eval_dataset=rows, compute_metrics=metric, **how).train()
    assert metric.calls == 0
    assert "compute_metrics was called" not in capsys.readouterr().out


# -- a collator with names of ours -------------------------------------------------------------------------------------


class Noisy:
    """Adds noise to what another collator makes; it has the attribute by which we know our own."""

    def __init__(self) -> None:
        self.data_collator = functools.partial(Collator())

    def __call__(self, rows: list[Item]) -> Item:
        batch: Item = self.data_collator(rows)
        return {**batch, "x": batch["x"] + torch.rand(())}


def test_wrapper_of_the_users_may_draw_though_the_collator_inside_does_not() -> None:
    from transformers import default_data_collator

    from trainwright.data.columns import RemoveColumnsCollator, draws_random_numbers

    noisy = Noisy()
    noisy.data_collator = default_data_collator
    assert draws_random_numbers(noisy)
    assert draws_random_numbers(RemoveColumnsCollator(noisy, ["x"]))
    assert not draws_random_numbers(RemoveColumnsCollator(default_data_collator, ["x"]))
