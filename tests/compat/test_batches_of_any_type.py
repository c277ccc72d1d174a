"""Batches that are no dicts: lists, tuples, tensors and objects train, evaluate and predict as with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from .._support.small import OURS, REFERENCE, Side, logged, make_trainer, weights

Rows = list[tuple[torch.Tensor, int]]
NUM_SAMPLES = 10  # evaluation batches of 4: the last one has 2


def samples() -> Rows:
    numbers = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=numbers), i % 3) for i in range(NUM_SAMPLES)]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Graph:
    """Like the batch of a graph library: its tensors are attributes and entries."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return 2

    def __contains__(self, name: str) -> bool:
        return name in ("x", "y")


def joined(rows: Rows) -> Pair:
    return Pair(torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows]))


def read(batch: Any) -> Pair:
    """The inputs and the labels of a batch of any kind below."""
    if isinstance(batch, torch.Tensor):
        return Pair(batch[:, :4], batch[:, 4].long())
    if hasattr(batch, "x"):
        return Pair(batch.x, batch.y)
    if isinstance(batch[0], torch.Tensor):
        return Pair(batch[0], batch[1])
    if isinstance(batch[0], dict):
        return joined([(row["x"], int(row["y"])) for row in batch])
    return joined(batch)


COLLATORS: dict[str, Callable[[Rows], Any]] = {
    "list": lambda rows: list(joined(rows)),
    "tuple": lambda rows: tuple(joined(rows)),
    "samples": lambda rows: rows,
    "dicts": lambda rows: [{"x": x, "y": y} for x, y in rows],
    "graph": lambda rows: Graph(*joined(rows)),
    "named tuple": joined,
    "object": lambda rows: SimpleNamespace(**joined(rows)._asdict()),
    "tensor": lambda rows: torch.cat([joined(rows).x, joined(rows).y[:, None].float()], dim=1),
}
NEED_OWN_INPUTS = ("named tuple", "object")  # transformers' `_prepare_inputs` does not take them
DO_NOT_TRAIN_THERE = ("object", "tensor")  # transformers looks for labels in them


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def loss_of(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    x, y = read(inputs)
    outputs = model(x)
    loss = nn.functional.cross_entropy(outputs, y)
    return (loss, outputs) if return_outputs else loss


def predicted(self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
    inputs = self._prepare_inputs(inputs)
    with torch.no_grad():
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
    return (loss, None, None) if prediction_loss_only else (loss, outputs, read(inputs).y)


def trainer_of(side: Side, kind: str, folder: Path, **how: Any) -> Any:
    methods: dict[str, Any] = {"compute_loss": loss_of, "prediction_step": predicted}
    if kind in NEED_OWN_INPUTS:
        methods["_prepare_inputs"] = lambda self, inputs: inputs
    cls = type("ReadsItself", (side.trainer,), methods)
    settings = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "remove_unused_columns": False,
        "include_num_input_tokens_seen": False,
    }
    return make_trainer(
        folder,
        side,
        cls,
        model=Classifier(),
        data_collator=COLLATORS[kind],
        train_dataset=samples(),
        eval_dataset=samples(),
        **settings | how,
    )


def both(kind: str, folder: Path, use: Callable[[Any], Any], **how: Any) -> list[Any]:
    return [use(trainer_of(side, kind, folder / side.name, **how)) for side in (OURS, REFERENCE)]


@pytest.mark.framework
@pytest.mark.parametrize("kind", sorted(COLLATORS.keys() - set(DO_NOT_TRAIN_THERE)))
@pytest.mark.parametrize("setting", ["include_num_input_tokens_seen", "auto_find_batch_size"])
def test_they_train_to_the_same_weights(kind: str, setting: str, tmp_path: Path) -> None:
    def use(trainer: Any) -> Any:
        trainer.train()
        return trainer

    ours, theirs = both(kind, tmp_path, use, **{setting: True})
    assert logged(ours, "loss") == logged(theirs, "loss")
    assert all(torch.equal(weights(ours.model)[name], value) for name, value in weights(theirs.model).items())


@pytest.mark.framework
@pytest.mark.parametrize("kind", COLLATORS)
def test_they_evaluate_and_predict_to_the_same_numbers(kind: str, tmp_path: Path) -> None:
    def use(trainer: Any) -> Any:
        trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
        output = trainer.predict(samples())
        return trainer.evaluate(), output

    (mine, my_output), (theirs, output) = both(kind, tmp_path, use, label_names=["y"])
    assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-6)
    assert mine["eval_rows"] == theirs["eval_rows"] == NUM_SAMPLES
    assert (my_output.predictions == output.predictions).all()
    assert (my_output.label_ids == output.label_ids).all()


@pytest.mark.parametrize("kind", COLLATORS)
def test_they_train_with_evaluations_guards_and_the_ledger(kind: str, tmp_path: Path) -> None:
    """What only this package has reads no entries by name of a batch without names: here in a step with NaN."""
    trainer = trainer_of(
        OURS, kind, tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, ledger=True
    )
    compute_loss = trainer.compute_loss

    def bad_at_first(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        is_bad = trainer.model.training and trainer.state.global_step == 0
        return loss * float("nan") if is_bad else loss

    trainer.compute_loss = bad_at_first
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 2
    assert trainer.state.global_step == 4


def test_a_batch_without_names_for_a_forward_that_takes_names_is_explained(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, data_collator=lambda rows: [torch.zeros(2, 6)])
    with pytest.raises(
        ValueError, match=r"A batch is a list; .*forward gets its inputs by name.*override compute_loss"
    ):
        trainer.train()
    own = type("OwnLoss", (type(trainer),), {"compute_loss": loss_of})
    trainer = make_trainer(tmp_path, cls=own, data_collator=COLLATORS["list"], eval_dataset=samples())
    with pytest.raises(ValueError, match=r"An evaluation batch is a list.*Override prediction_step"):
        trainer.evaluate()
