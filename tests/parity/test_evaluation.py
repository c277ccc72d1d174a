"""Evaluation within a run, the best model at its end, and predictions: as transformers has them.

Evaluation draws from the global generator in the original and leaves it alone in ours, so these rows have no dropout
and an order of samples that does not depend on it. `eval_loss` is a mean over items here and a mean over batches there:
on batches of one size they are the same up to the order of the additions, hence `approx` for that number and no other.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .rows import BERT, DICT, LLAMA, PADDED, TUPLE, Parts, Row, Task
from .run import trainer_of
from .sides import OURS, REFERENCE, Log, Side, differing, without_clock

CLASSIFIERS = (BERT, DICT, TUPLE)


def accuracy(prediction: Any) -> dict[str, float]:
    found = prediction.predictions.argmax(-1)
    return {"accuracy": float((found == prediction.label_ids).mean()), "mean": float(prediction.predictions.mean())}


def evaluated(task: Task) -> Parts:
    """24 samples that are not trained on; a language model is judged by its loss alone."""
    metrics = {} if task is LLAMA else {"compute_metrics": accuracy}
    return lambda model: {"eval_dataset": task.items(50)[26:], **metrics}


def trainer(task: Task, side: Side, output_dir: Path, **settings: Any) -> Any:
    row = Row(task, "evaluated", parts=evaluated(task))
    return trainer_of(row, side, output_dir / side.name, **{"per_device_eval_batch_size": 8} | settings)


def assert_same_log(ours: Log, theirs: Log, close: float = 1e-6) -> None:
    assert [list(entry) for entry in ours] == [list(entry) for entry in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            is_mean = key in ("eval_loss", "test_loss")
            assert mine[key] == (pytest.approx(value, rel=close) if is_mean else value), (key, mine, other)


SCHEDULES = {
    "steps": {"eval_strategy": "steps", "eval_steps": 4},
    "epochs": {"eval_strategy": "epoch"},
    "share-of-steps": {"eval_strategy": "steps", "eval_steps": 0.25},
    "delayed": {"eval_strategy": "steps", "eval_steps": 3, "eval_delay": 8},
    "on-start": {"eval_strategy": "epoch", "eval_on_start": True},
    "accumulated": {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 4},
    "plateau": {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau",
                "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5}},
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("task", [BERT, LLAMA, TUPLE], ids=lambda task: task.name)
def test_evaluating_along_the_way(task: Task, schedule: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = (side.train(trainer(task, side, tmp_path, **schedule)) for side in (OURS, REFERENCE))
    assert any("eval_loss" in entry for entry in theirs.log)
    assert_same_log(ours.log, theirs.log)
    assert differing(ours.weights, theirs.weights) == {}


BEST = {
    "loss": {},
    "accuracy": {"metric_for_best_model": "accuracy"},
    "smaller-is-better": {"metric_for_best_model": "eval_accuracy", "greater_is_better": False},
    "by-epoch": {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 4},
    "saved-when-best": {"save_strategy": "best", "metric_for_best_model": "mean", "greater_is_better": True},
    "keep-one": {"save_total_limit": 1, "metric_for_best_model": "mean", "greater_is_better": True},
}


@pytest.mark.parametrize("best", BEST.values(), ids=BEST.keys())
@pytest.mark.parametrize("task", [BERT, DICT], ids=lambda task: task.name)
def test_the_best_model_is_there_at_the_end(task: Task, best: dict[str, Any], tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
                "load_best_model_at_end": True, "learning_rate": 0.3} | best  # fmt: skip
    made = [trainer(task, side, tmp_path, **settings) for side in (OURS, REFERENCE)]
    ours, theirs = (side.train(one) for side, one in zip((OURS, REFERENCE), made, strict=True))
    mine, other = (one.state for one in made)
    assert other.best_global_step < other.global_step, "the row says nothing: the last model is the best"
    assert mine.best_global_step == other.best_global_step
    assert mine.best_metric == pytest.approx(other.best_metric, rel=1e-6)
    assert Path(mine.best_model_checkpoint).name == Path(other.best_model_checkpoint).name
    assert_same_log(ours.log, theirs.log)
    assert differing(ours.weights, theirs.weights) == {}


@pytest.mark.parametrize("task", [*CLASSIFIERS, PADDED, LLAMA], ids=lambda task: task.name)
@pytest.mark.parametrize("settings", [{}, {"eval_accumulation_steps": 2}, {"per_device_eval_batch_size": 5}], ids=str)
def test_predictions_are_equal(task: Task, settings: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for side in (OURS, REFERENCE):
        one = trainer(task, side, tmp_path, **settings)
        side.train(one)
        found.append(one.predict(task.items(50)[26:]))
    ours, theirs = found
    assert np.array_equal(ours.predictions, theirs.predictions)
    assert np.array_equal(ours.label_ids, theirs.label_ids)
    # Batches of 5 leave one of 4: the mean over batches is not the mean over items.
    close = 1e-2 if "per_device_eval_batch_size" in settings else 1e-6
    assert_same_log(*(without_clock([one.metrics]) for one in found), close=close)  # type: ignore[misc]


def test_evaluating_leaves_the_weights_and_the_random_state_alone(tmp_path: Path) -> None:
    """Ours only: with dropout, a run that evaluates ends with the weights of one that does not."""
    plain = OURS.train(trainer_of(Row(BERT, "plain", dropout=0.2), OURS, tmp_path / "plain"))
    row = Row(BERT, "evaluated", dropout=0.2, parts=evaluated(BERT))
    judged = OURS.train(trainer_of(row, OURS, tmp_path / "judged", eval_strategy="steps", eval_steps=3))
    assert differing(judged.weights, plain.weights) == {}
