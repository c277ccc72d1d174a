"""Checks of the fields about the length of a run and its batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainwright.engine.select import SingleEngine

from .bench import NUM_SAMPLES, Bench, Toy, logged, seeded
from .table import shows


def sizes(batches: list[list[int]]) -> list[int]:
    return [len(batch) for batch in batches]


@shows("num_train_epochs")
def the_data_is_passed_over_so_often(bench: Bench) -> None:
    assert len(bench.train(num_train_epochs=2).model.order) == 2 * NUM_SAMPLES
    assert len(bench.train(num_train_epochs=0.5).model.order) == NUM_SAMPLES // 2


@shows("max_steps")
def so_many_steps_are_taken(bench: Bench) -> None:
    trainer = bench.train(max_steps=8)
    assert trainer.state.global_step == trainer.state.max_steps == len(trainer.model.trained) == 8


@shows("per_device_train_batch_size")
def training_batches_have_this_size(bench: Bench) -> None:
    trainer = bench.train(per_device_train_batch_size=5)
    assert sizes(trainer.model.trained) == [5, 5, 2]
    assert trainer.state.train_batch_size == 5


@shows("per_device_eval_batch_size")
def evaluation_batches_have_this_size(bench: Bench) -> None:
    trainer = bench.trainer(per_device_eval_batch_size=5)
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert sizes(trainer.model.evaluated) == 2 * [5, 5, 2]


@shows("gradient_accumulation_steps")
def small_batches_make_the_step_of_a_large_one(bench: Bench) -> None:
    settings: dict[str, Any] = {"optim": "sgd", "seed": 1}
    accumulated = bench.train(gradient_accumulation_steps=3, **settings)
    at_once = bench.train(per_device_train_batch_size=6, **settings)
    assert accumulated.state.global_step == at_once.state.global_step == 2
    assert sizes(accumulated.model.trained) == 6 * [2]
    for one, other in zip(accumulated.model.parameters(), at_once.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class NeedsRoom(Toy):
    """Has room for two samples."""

    def forward(self, x: Any, index: Any = None, labels: Any = None) -> Any:
        if len(x) > 2:
            raise torch.OutOfMemoryError(f"{len(x)} samples do not fit")
        return super().forward(x, index, labels)


@shows("auto_find_batch_size")
def batches_that_do_not_fit_are_cut(bench: Bench) -> None:
    settings: dict[str, Any] = {"optim": "sgd", "per_device_train_batch_size": 6}
    with pytest.raises(torch.OutOfMemoryError):
        bench.train(model=seeded(NeedsRoom), **settings)
    cut = bench.train(model=seeded(NeedsRoom), auto_find_batch_size=True, **settings)
    assert cut.state.global_step == 2
    assert sorted(cut.model.order) == list(range(NUM_SAMPLES))
    whole = bench.train(**settings)
    for one, other in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class CountsItems(Toy):
    accepts_loss_kwargs = True

    def forward(self, x: Any, index: Any = None, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        return super().forward(x, index, labels)


@shows("average_tokens_across_devices")
def losses_count_over_all_processes(bench: Bench) -> None:
    """A loss divided by the items of two processes is multiplied by two, since their gradients are averaged."""
    bench.monkeypatch.setattr(SingleEngine, "num_processes", 2)

    def losses(*, average: bool) -> list[float]:
        settings = {"average_tokens_across_devices": average, "learning_rate": 0.0}
        return logged(bench.train(model=seeded(CountsItems), **settings), "loss")

    assert losses(average=True) == [2 * loss for loss in losses(average=False)]
