"""Metrics with a memory of their own: fed batch by batch, under their own names for the arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.errors import DataError

from .._support.small import data, make_trainer, models

NUM = 11


class Counts:
    """Our own protocol: `update(predictions, references)` and `compute()`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = 0
        self.sizes = [0][:0]

    def update(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right += int((predictions.argmax(-1) == references).sum())
        self.sizes.append(len(references))

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.right / sum(self.sizes)}


class OneNumber(Counts):
    """Other names, one number."""

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        super().update(preds, target)

    def compute(self) -> Any:
        return super().compute()["accuracy"]


class ByPosition(Counts):
    def update(self, *both: torch.Tensor) -> None:  # type: ignore[override]
        super().update(*both)


# The two packages are imported in their own cases: they take a second, in each process that collects the tests.


def of_evaluate() -> Any:
    """As `evaluate.load` gives them, without a download."""
    import datasets
    import evaluate

    class Accuracy(evaluate.Metric):  # type: ignore[misc]
        def _info(self) -> Any:
            kinds = {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
            return evaluate.MetricInfo(
                description="", citation="", inputs_description="", features=datasets.Features(kinds)
            )

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}

    return Accuracy()


def several_of_evaluate() -> Any:
    import evaluate

    return evaluate.combine([of_evaluate()])


def micro() -> Any:
    import torchmetrics

    return torchmetrics.classification.MulticlassAccuracy(models.CLASSES, average="micro")


def collection() -> Any:
    import torchmetrics

    return torchmetrics.MetricCollection({"accuracy": micro()})


METRICS: dict[str, tuple[Any, str]] = {
    "ours": (Counts, "eval_accuracy"),
    "one number": (OneNumber, "eval_OneNumber"),
    "by position": (ByPosition, "eval_accuracy"),
    "torchmetrics": (micro, "eval_MulticlassAccuracy"),
    "a collection": (collection, "eval_accuracy"),
    "evaluate": (of_evaluate, "eval_accuracy"),
    "several of evaluate": (several_of_evaluate, "eval_accuracy"),
}


def whole(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@pytest.mark.parametrize(("make", "name"), METRICS.values(), ids=METRICS.keys())
def test_as_the_same_metric_of_everything(make: Any, name: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if make in (of_evaluate, several_of_evaluate):  # these take classes
        more["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    items = data.vectors(NUM)
    trainer = make_trainer(tmp_path, eval_dataset=items, compute_metrics=make(), per_device_eval_batch_size=4, **more)
    expected = make_trainer(tmp_path, eval_dataset=items, compute_metrics=whole).evaluate()["eval_accuracy"]
    assert trainer.evaluate()[name] == pytest.approx(expected)
    assert trainer.evaluate()[name] == pytest.approx(expected), "the second evaluation starts anew"
    assert trainer.evaluate(items[:5])[name] != trainer.evaluate(items[5:])[name]


def test_nothing_is_kept_but_a_prediction_has_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr("trainwright.evaluation.eval_loop.NestedCollector.add", lambda self, batch: kept.append(batch))
    metric = Counts()
    trainer = make_trainer(
        tmp_path, eval_dataset=data.vectors(NUM), compute_metrics=metric, per_device_eval_batch_size=4
    )
    trainer.evaluate()
    assert (kept, metric.sizes) == ([], [4, 4, 3])
    monkeypatch.undo()
    found = trainer.predict(data.vectors(NUM))
    assert len(found.predictions) == NUM
    assert "test_accuracy" in found.metrics
    assert "test_accuracy" not in trainer.predict([{"x": item["x"]} for item in data.vectors(NUM)]).metrics


def test_a_name_that_decides_is_looked_for_in_it_too(tmp_path: Path) -> None:
    metric = Counts()
    how = {
        "eval_dataset": data.vectors(NUM),
        "compute_metrics": metric,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "num_train_epochs": 1,
        "per_device_eval_batch_size": 4,
    }
    with pytest.raises(KeyError, match="eval_accuracy"):
        make_trainer(tmp_path, metric_for_best_model="f1", **how).train()
    trainer = make_trainer(tmp_path, metric_for_best_model="accuracy", **how)
    trainer.train()
    assert trainer.state.best_metric == metric.compute()["accuracy"]


def test_an_invalid_result(tmp_path: Path) -> None:
    class Lists(Counts):
        def compute(self) -> Any:
            return [1, 2]

    with pytest.raises(DataError, match=r"Lists\.compute\(\) returned a list"):
        make_trainer(tmp_path, eval_dataset=data.vectors(3), compute_metrics=Lists()).evaluate()
