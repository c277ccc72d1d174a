"""What no evaluation could do is said before step 1; and a rehearsal leaves no trace."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from trainwright import Trainer, TrainerCallback
from trainwright.errors import DataError, MetricError
from trainwright.run.train import check_evaluation

from .._support.small import data, differing, logged, make_trainer, train, weights

BY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch"}


class Steps(TrainerCallback):
    """What a run told before its first step, and how many steps it took."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("begin")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("step")

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("prediction")

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("evaluate")

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("log")


def judged(tmp_path: Path, metric: str | None, **parts: Any) -> tuple[Any, Steps]:
    steps = Steps()
    parts = {"eval_dataset": data.vectors(9), "compute_metrics": lambda p: {"score": 1.0}} | BY_EPOCH | parts
    return make_trainer(tmp_path, callbacks=[steps], metric_for_best_model=metric, **parts), steps


@pytest.mark.parametrize(("metric", "sets"), [("acuracy", False), ("near_acuracy", True), ("my_loss", False)])
def test_a_metric_that_is_not_computed(metric: str, sets: bool, tmp_path: Path) -> None:
    dataset = {"near": data.vectors(9), "far": data.vectors(5)} if sets else data.vectors(9)
    trainer, steps = judged(tmp_path, metric, eval_dataset=dataset)
    with pytest.raises(MetricError, match=rf"'{metric}'.*'eval_{metric}'.*eval_(near_)?score"):
        trainer.train()
    assert steps.events == []


@pytest.mark.parametrize("metric", ["score", "eval_score", "loss", "runtime", "eval_samples_per_second", None])
def test_a_metric_that_is_there(metric: str | None, tmp_path: Path) -> None:
    trainer, steps = judged(tmp_path, metric, max_steps=1, save_strategy="no")
    trainer.train()
    assert steps.events[:2] == ["begin", "step"]


def test_one_of_several_sets_by_its_name(tmp_path: Path) -> None:
    sets = {"a": data.vectors(5), "a_b": data.vectors(9)}
    trainer, _ = judged(tmp_path, "a_b_score", eval_dataset=sets, max_steps=1)
    trainer.train()
    assert trainer.state.best_metric == 1.0


def test_one_batch_is_looked_at_where_nothing_depends_on_it(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        calls.append(len(prediction.predictions))
        if len(prediction.predictions) < 9:
            raise TypeError("not on so few")
        return {}

    for metric in (None, "loss"):
        trainer, _ = judged(tmp_path, metric, compute_metrics=compute_metrics, max_steps=1)
        trainer.train()
    assert calls == [8, 9, 8, 9]


@pytest.mark.parametrize("streams", [False, True])
def test_one_batch_is_enough(streams: bool, tmp_path: Path) -> None:
    sizes: list[int] = []

    def compute_metrics(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        sizes.append(len(prediction.predictions))
        return {"score": 1.0}

    trainer, _ = judged(
        tmp_path,
        "score",
        compute_metrics=compute_metrics,
        max_steps=1,
        batch_eval_metrics=streams,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    assert sizes == ([4, 4, 4, 1] if streams else [4, 9])


class Reads(Dataset[Any]):
    """Draws from the random generators at each read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        torch.rand(1), np.random.rand()
        return data.vectors(9)[index]


def test_it_leaves_no_trace(tmp_path: Path) -> None:
    dataset = Reads()
    rehearsed, _ = judged(tmp_path, "score", eval_dataset=dataset, per_device_eval_batch_size=2, max_steps=5)
    one = train(rehearsed)
    plain, _ = judged(tmp_path, "loss", eval_dataset=Reads(), per_device_eval_batch_size=2, max_steps=5)
    other = train(plain)
    assert one.losses() == other.losses()
    assert differing(one.weights, other.weights) == {}
    assert dataset.reads == [0, 1, *range(9)]
    assert [sorted(entry) for entry in rehearsed.state.log_history] == [sorted(e) for e in plain.state.log_history]


def test_modes_of_modules_are_as_before(tmp_path: Path) -> None:
    modes: list[bool] = []

    class Looks(TrainerCallback):
        def on_train_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
            modes.extend(module.training for module in model.modules())

    trainer, _ = judged(tmp_path, "score", max_steps=1)
    trainer.add_callback(Looks())
    trainer.train()
    assert modes
    assert all(modes)


# -- metrics that fail -----------------------------------------------------------------------------------------------


def fails(error: Exception) -> Any:
    def compute_metrics(prediction: Any) -> dict[str, float]:
        if len(prediction.predictions) < 9:
            raise error
        return {"score": 0.5}

    return compute_metrics


def test_a_metric_that_needs_more_than_a_batch_is_not_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = fails(ValueError("Only one class present"))
    trainer, _ = judged(tmp_path, "score", compute_metrics=metrics, log_level="warning", max_steps=1)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "Only one class present" in caplog.text
    assert trainer.state.best_metric == 0.5
    assert trainer.compute_metrics is metrics


@pytest.mark.parametrize("error", [NameError("x"), AttributeError("x"), TypeError("x"), ImportError("x")], ids=repr)
def test_a_metric_that_fails_on_any_data_fails_at_once(error: Exception, tmp_path: Path) -> None:
    trainer, steps = judged(tmp_path, "score", compute_metrics=fails(error))
    with pytest.raises(type(error)):
        trainer.train()
    assert steps.events == []


@pytest.mark.parametrize("value", [0.5, None, [("score", 1)]])
def test_a_metric_that_returns_no_dict(value: Any, tmp_path: Path) -> None:
    trainer, steps = judged(tmp_path, "score", compute_metrics=lambda p: value)
    with pytest.raises(DataError, match=f"returned a {type(value).__name__}; it must return a dict"):
        trainer.train()
    assert steps.events == []


def test_a_model_that_fails_in_evaluation_fails_at_once(tmp_path: Path) -> None:
    class Fails(Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("not that shape")

    steps = Steps()
    trainer = make_trainer(
        tmp_path,
        cls=Fails,
        eval_dataset=data.vectors(9),
        metric_for_best_model="score",
        compute_metrics=lambda p: {"score": 1.0},
        callbacks=[steps],
        **BY_EPOCH,
    )
    with pytest.raises(ValueError, match="not that shape"):
        trainer.train()
    assert steps.events == []


# -- data ------------------------------------------------------------------------------------------------------------

UNLABELLED = [{"x": item["x"]} for item in data.vectors(9)]


@pytest.mark.parametrize("metric", [None, "score"])
@pytest.mark.parametrize("sets", [False, True])
def test_metrics_without_labels(
    sets: bool, metric: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = {"near": UNLABELLED, "far": UNLABELLED} if sets else UNLABELLED
    metric = metric and f"near_{metric}" if sets else metric
    trainer, steps = judged(tmp_path, metric, eval_dataset=dataset, log_level="warning")
    if metric is None:
        trainer.train()
        assert not logged(trainer, "eval_score")
        assert logged(trainer, "eval_near_runtime" if sets else "eval_runtime")
    else:
        with pytest.raises(MetricError, match=f"the evaluation returns no 'eval_{metric}'"):
            trainer.train()
        assert steps.events == []
    assert "no labels: looked for labels; found x. Rename" in caplog.text


@pytest.mark.parametrize("dataset", [[], {"near": [], "far": []}], ids=["one", "several"])
def test_an_empty_evaluation_set_that_is_to_judge_models(dataset: Any, tmp_path: Path) -> None:
    metric = "near_loss" if isinstance(dataset, dict) else "loss"
    trainer, steps = judged(tmp_path, metric, eval_dataset=dataset, compute_metrics=None)
    with pytest.raises(DataError, match="eval_dataset is empty"):
        trainer.train()
    assert steps.events == []


@pytest.mark.parametrize("name", ["evaluate", "prediction_step", "get_eval_dataloader"])
def test_who_overrides_evaluation_knows_what_it_needs(name: str, tmp_path: Path) -> None:
    class Own(Trainer):
        pass

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        return {"eval_score": 1.0}

    setattr(Own, name, override)
    trainer = make_trainer(
        tmp_path, cls=Own, eval_dataset=UNLABELLED, compute_metrics=lambda p: {}, eval_strategy="epoch"
    )
    before = weights(trainer.model)
    check_evaluation(trainer)
    assert differing(weights(trainer.model), before) == {}
