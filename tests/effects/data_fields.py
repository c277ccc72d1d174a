"""Checks of the fields about data and dataloaders."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

from trainwright.errors import DataError

from .bench import NUM_SAMPLES, Bench, Item, samples, seeded
from .table import shows


def loaders(trainer: Any) -> list[DataLoader[Any]]:
    """For training, evaluation and prediction."""
    return [
        trainer.get_train_dataloader(),
        trainer.get_eval_dataloader(),
        trainer.get_test_dataloader(trainer.eval_dataset),
    ]


def loader_attribute(bench: Bench, name: str, **settings: Any) -> Any:
    """An attribute of the dataloaders, the same in all three."""
    values = {getattr(loader, name) for loader in loaders(bench.trainer(**settings))}
    assert len(values) == 1
    return values.pop()


@shows("dataloader_drop_last")
def a_last_batch_that_is_not_full_is_dropped(bench: Bench) -> None:
    def sizes(**settings: Any) -> list[int]:
        batches = bench.train(per_device_train_batch_size=5, **settings).model.trained
        return [len(batch) for batch in batches]

    assert sizes() == [5, 5, 2]
    assert sizes(dataloader_drop_last=True) == [5, 5]


class WhoReads:
    """Samples with the process that read them."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Item:
        return {**samples()[index], "index": torch.tensor(os.getpid())}


@shows("dataloader_num_workers", marks="process")
def other_processes_load_the_data(bench: Bench) -> None:
    assert set(bench.train(train_dataset=WhoReads()).model.order) == {os.getpid()}
    readers = set(bench.train(train_dataset=WhoReads(), dataloader_num_workers=2).model.order)
    assert len(readers) == 2
    assert os.getpid() not in readers
    assert loader_attribute(bench, "num_workers", dataloader_num_workers=2) == 2


@shows("dataloader_pin_memory")
def batches_are_pinned_where_there_is_a_gpu(bench: Bench) -> None:
    pinned = bench.trainer(use_cpu=False)
    unpinned = bench.trainer(use_cpu=False, dataloader_pin_memory=False)
    assert not any(loader.pin_memory for loader in loaders(pinned))  # nothing to copy to
    bench.with_gpu()
    assert all(loader.pin_memory for loader in loaders(pinned))
    assert not any(loader.pin_memory for loader in loaders(unpinned))


@shows("dataloader_persistent_workers")
def workers_stay_for_the_next_evaluation(bench: Bench) -> None:
    kept = bench.trainer(dataloader_num_workers=1, dataloader_persistent_workers=True)
    assert all(loader.persistent_workers for loader in loaders(kept))
    assert kept.get_eval_dataloader() is kept.get_eval_dataloader()
    made = bench.trainer(dataloader_num_workers=1)
    assert not any(loader.persistent_workers for loader in loaders(made))
    assert made.get_eval_dataloader() is not made.get_eval_dataloader()


@shows("dataloader_prefetch_factor")
def workers_load_so_many_batches_ahead(bench: Bench) -> None:
    assert loader_attribute(bench, "prefetch_factor", dataloader_num_workers=1, dataloader_prefetch_factor=5) == 5
    assert loader_attribute(bench, "prefetch_factor", dataloader_num_workers=1) == 2


@shows("dataloader_multiprocessing_context")
def workers_start_in_this_way(bench: Bench) -> None:
    trainer = bench.trainer(dataloader_num_workers=1, dataloader_multiprocessing_context="spawn")
    assert [loader.multiprocessing_context.get_start_method() for loader in loaders(trainer)] == 3 * ["spawn"]
    assert loader_attribute(bench, "multiprocessing_context", dataloader_num_workers=1) is None


@shows("dataloader_in_order")
def batches_come_as_workers_finish_them(bench: Bench) -> None:
    assert loader_attribute(bench, "in_order", dataloader_num_workers=2)
    assert not loader_attribute(bench, "in_order", dataloader_num_workers=2, dataloader_in_order=False)


@shows("remove_unused_columns")
def columns_that_the_model_does_not_take_are_dropped(bench: Bench) -> None:
    rows = [{**row, "spare": torch.tensor(0)} for row in samples()]
    columns = Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in rows])
    for dataset in (rows, columns):
        bench.train(train_dataset=dataset)
        with pytest.raises(TypeError, match="spare"):
            bench.train(train_dataset=dataset, remove_unused_columns=False)


class Named(nn.Module):
    """Has labels that are not called so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, target), "logits": logits} if target is not None else {}


@shows("label_names")
def these_inputs_are_the_labels(bench: Bench) -> None:
    rows = [{"x": row["x"], "target": row["labels"]} for row in samples()]
    data: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows}
    output = bench.trainer(model=seeded(Named), **data, label_names=["target"]).predict(rows)
    assert output.label_ids.tolist() == [row["target"].item() for row in rows]
    assert output.metrics["test_loss"] > 0
    unnamed = bench.trainer(model=seeded(Named), **data).predict(rows)
    assert (unnamed.label_ids, unnamed.metrics.get("test_loss")) == (None, None)


@shows("train_sampling_strategy")
def samples_come_in_this_order(bench: Bench) -> None:
    rows = [{**row, "input_ids": [0] * (1 + i * 5 % NUM_SAMPLES)} for i, row in enumerate(samples())]

    def order(**settings: Any) -> list[int]:
        return bench.train(train_dataset=rows, **settings).model.order  # type: ignore[no-any-return]

    in_sequence = list(range(NUM_SAMPLES))
    assert order(train_sampling_strategy="sequential") == in_sequence
    assert order() != in_sequence
    assert sorted(order()) == in_sequence
    grouped = order(train_sampling_strategy="group_by_length", per_device_train_batch_size=12)
    assert [len(rows[i]["input_ids"]) for i in grouped] == list(range(NUM_SAMPLES, 0, -1))
    settings: dict[str, Any] = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    rebalanced = bench.train(train_dataset=rows, train_sampling_strategy="batch_rebalance", **settings).model
    assert sorted(rebalanced.order) == in_sequence
    costs = [len(batch) * max(len(rows[i]["input_ids"]) for i in batch) for batch in rebalanced.trained]
    assert len(costs) == 4
    assert max(costs) < 1.6 * min(costs)


@shows("length_column_name")
def the_length_is_in_this_column(bench: Bench) -> None:
    settings: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 12}
    rows = [{name: value.tolist() for name, value in row.items()} for row in samples()]
    data = Dataset.from_list([{**row, "size": 1 + row["index"] * 5 % NUM_SAMPLES} for row in rows])
    order = bench.train(train_dataset=data, **settings, length_column_name="size").model.order
    assert [data[i]["size"] for i in order] == list(range(NUM_SAMPLES, 0, -1))
    with pytest.raises(DataError, match="length_column_name"):
        bench.train(train_dataset=data, **settings)
