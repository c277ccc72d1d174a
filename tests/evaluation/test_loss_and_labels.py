"""What of a batch is the loss and what the labels: found where they can be, else said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Trainer
from trainwright.errors import ModelError
from trainwright.support.tensor_tree import count_samples

from .._support.small import data, logged, make_trainer, models

ROWS = data.vectors(6)
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "eval_dataset": ROWS}
Returned = tuple[Any, str]


class Returns(Trainer):
    """Whatever a test wants `compute_loss` to return with `return_outputs=True`."""

    form: Any = staticmethod(lambda loss, outputs: loss)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return self.form(outputs["loss"], outputs) if return_outputs else outputs["loss"]


def returning(form: Any) -> type[Trainer]:
    return type("Own", (Returns,), {"form": staticmethod(form)})


@pytest.mark.parametrize("form", [lambda loss, outputs: loss, lambda loss, outputs: (loss, None)])
def test_a_loss_alone_is_reported(form: Any, tmp_path: Path) -> None:
    settings = EVALUATES | {"learning_rate": 0.0}
    plain = make_trainer(tmp_path, **settings)
    trainer = make_trainer(tmp_path, cls=returning(form), **settings)
    for one in (plain, trainer):
        one.train()
    assert logged(trainer, "eval_loss") == logged(plain, "eval_loss")
    assert len(logged(trainer, "eval_loss")) == 2
    found = trainer.predict(ROWS)
    assert found.predictions is None
    assert len(found.label_ids) == len(ROWS)


BAD: list[Returned] = [
    (lambda loss, outputs: loss, "returned the loss without outputs"),
    (lambda loss, outputs: outputs, "returned a dict"),
    (lambda loss, outputs: (loss, outputs, 1), "returned a tuple of Tensor, dict, int"),
    (lambda loss, outputs: None, "returned a NoneType"),
]


@pytest.mark.parametrize(("form", "words"), BAD, ids=[words for _, words in BAD])
def test_metrics_without_predictions_are_refused_before_step_1(form: Any, words: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, cls=returning(form), compute_metrics=lambda p: {}, **EVALUATES)
    with pytest.raises(ModelError, match=rf"return_outputs=True and {words}.*\(loss, outputs\)"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_metrics_that_nothing_computes_need_no_outputs(tmp_path: Path) -> None:
    cls = returning(lambda loss, outputs: loss)
    trainer = make_trainer(tmp_path, cls=cls, compute_metrics=lambda p: {}, prediction_loss_only=True, **EVALUATES)
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 2


class NamesItsTarget(nn.Module):
    """Takes its labels as `y`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(data.FEATURES, models.CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(x)
        return {"loss": None if y is None else nn.functional.cross_entropy(logits, y), "logits": logits}


def renamed(name: str) -> list[dict[str, Any]]:
    return [{"x": row["x"], name: row["labels"]} for row in ROWS]


def test_a_target_of_another_name_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = {"model": NamesItsTarget(), "train_dataset": renamed("y")} | EVALUATES | {"eval_dataset": renamed("y")}
    trainer = make_trainer(tmp_path, **parts)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer.train()
        trainer.predict(renamed("y"))
    assert caplog.text.count('label_names=["y"]') == 1
    assert logged(trainer, "eval_loss") == []
    told = make_trainer(tmp_path, label_names=["y"], **parts)
    assert told.evaluate()["eval_loss"] > 0
    assert len(told.predict(renamed("y")).label_ids) == len(ROWS)


def test_metrics_without_labels_name_the_target(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = {"model": NamesItsTarget(), "train_dataset": renamed("y")} | EVALUATES | {"eval_dataset": renamed("y")}
    trainer = make_trainer(tmp_path, compute_metrics=lambda p: {}, **parts)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer.evaluate()
    assert "looked for labels, of which this model takes none; found x, y. Rename the column" in caplog.text
    assert 'label_names=["y"]' in caplog.text


@pytest.mark.parametrize("settings", [{}, {"label_names": ["y"]}], ids=["unnamed", "named"])
def test_a_check_says_what_an_evaluation_returns(settings: dict[str, Any], tmp_path: Path) -> None:
    parts = {"model": NamesItsTarget(), "train_dataset": renamed("y"), "eval_dataset": renamed("y")}
    report = make_trainer(tmp_path, **parts, **settings).check()
    said = [finding for finding in report.findings if "An evaluation returns" in str(finding)]
    assert len(said) == 1
    assert said[0].severity == ("note" if settings else "warning")
    assert ("eval_loss" if settings else 'set label_names=["y"]') in str(said[0])


def test_no_label_names_means_no_labels(tmp_path: Path) -> None:
    """A list that the user has given is believed."""

    class Own(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("an evaluation without labels")

    class TakesAll(nn.Linear):
        def forward(self, **entries: Any) -> dict[str, Any]:
            return {"logits": super().forward(entries["x"])}

    model = TakesAll(data.FEATURES, 2)
    trainer = make_trainer(tmp_path, cls=Own, model=model, eval_dataset=ROWS, label_names=[])
    assert "eval_loss" not in trainer.evaluate()


def test_a_column_of_labels_reaches_a_loss_function(tmp_path: Path) -> None:
    """`forward` takes none, and unused columns are removed."""

    class Scores(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": super().forward(x)}

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels)

    model = Scores(data.FEATURES, models.CLASSES)
    trainer = make_trainer(tmp_path, model=model, train_dataset=ROWS, compute_loss_func=loss, **EVALUATES)
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 2


def test_smoothed_labels_of_a_model_that_takes_none(tmp_path: Path) -> None:
    class Scores(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            return (super().forward(x),)

    settings = {"label_smoothing_factor": 0.1, "remove_unused_columns": False}
    trainer = make_trainer(tmp_path, model=Scores(data.FEATURES, models.CLASSES), eval_dataset=ROWS, **settings)
    assert trainer.evaluate()["eval_loss"] > 0
    found = trainer.predict(ROWS)
    assert found.predictions.shape == (len(ROWS), models.CLASSES)
    assert len(found.label_ids) == len(ROWS)


SIZES: list[tuple[Any, int | None]] = [
    ({"x": torch.ones(3, 2), "boxes": torch.ones(7, 4)}, 3),
    ({"texts": ["a", "b"], "labels": [{}, {}]}, 2),
    ({"images": [torch.ones(3, 5, 5), torch.ones(3, 4, 4)], "labels": [{}, {}]}, 2),
    ({"images": [torch.ones(3, 5, 5)] * 2, "labels": torch.ones(2)}, 2),
    ({"inputs": {"ids": torch.ones(4, 2)}, "names": ["a"] * 4}, 4),
    ({"parts": [torch.ones(5, 1)] * 2, "others": [torch.ones(5, 1)] * 3}, 5),
    ({"name": "text"}, None),
]


@pytest.mark.parametrize(("batch", "size"), SIZES, ids=range(len(SIZES)))
def test_samples_of_a_batch(batch: Any, size: int | None) -> None:
    assert count_samples(batch) == size
