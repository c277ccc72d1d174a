"""Evaluation within a run, the best model at its end, and predictions: as transformers has them.

Evaluation draws from the global generator in the original and leaves it alone in ours, so these rows have no dropout
and an order of samples that does not depend on it. `eval_loss` is a mean over items here and a mean over batches there:
on batches of one size they are the same up to the order of the additions, hence `approx` for that number and no other.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from .golden import MARKS, Golden
from .rows import BERT, DICT, LLAMA, PADDED, TUPLE, Parts, Row, Task
from .run import trainer_of
from .sides import OURS, REFERENCE, Log, Outcome, Side, are_equal, differing, without_clock

pytestmark = [*MARKS, pytest.mark.costly]

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


def golden_of(family: str, run: Callable[[Side, Task, str], Any], cases: Iterable[tuple[Task, str]]) -> Golden:
    return Golden(family, {f"{task.name}-{how}": partial(run, REFERENCE, task, how) for task, how in cases})


SCHEDULES: dict[str, dict[str, Any]] = {
    "steps": {"eval_strategy": "steps", "eval_steps": 4},
    "epochs": {"eval_strategy": "epoch"},
    "share-of-steps": {"eval_strategy": "steps", "eval_steps": 0.25},
    "delayed": {"eval_strategy": "steps", "eval_steps": 3, "eval_delay": 8},
    "on-start": {"eval_strategy": "epoch", "eval_on_start": True},
    "accumulated": {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 4},
    "plateau": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
    },
}


def evaluating(side: Side, task: Task, schedule: str) -> Outcome:
    with TemporaryDirectory() as folder:
        return side.train(trainer(task, side, Path(folder), **SCHEDULES[schedule]))


EVALUATING = golden_of("evaluating", evaluating, product([BERT, LLAMA, TUPLE], SCHEDULES))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("task", [BERT, LLAMA, TUPLE], ids=lambda task: task.name)
def test_evaluating_along_the_way(task: Task, schedule: str) -> None:
    ours = evaluating(OURS, task, schedule)

    def compare(theirs: Outcome) -> None:
        assert any("eval_loss" in entry for entry in theirs.log)
        assert_same_log(ours.log, theirs.log)
        assert differing(ours.weights, theirs.weights) == {}

    EVALUATING.check(f"{task.name}-{schedule}", compare)


BEST: dict[str, dict[str, Any]] = {
    "loss": {},
    "accuracy": {"metric_for_best_model": "accuracy"},
    "smaller-is-better": {"metric_for_best_model": "eval_accuracy", "greater_is_better": False},
    "by-epoch": {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 4},
    "saved-when-best": {"save_strategy": "best", "metric_for_best_model": "mean", "greater_is_better": True},
    "keep-one": {"save_total_limit": 1, "metric_for_best_model": "mean", "greater_is_better": True},
}


def best_model(side: Side, task: Task, best: str) -> dict[str, Any]:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.3,
    } | BEST[best]
    with TemporaryDirectory() as folder:
        made = trainer(task, side, Path(folder), **settings)
        outcome = side.train(made)
        state = made.state
    return {
        "outcome": outcome,
        "step": state.best_global_step,
        "metric": state.best_metric,
        "checkpoint": Path(state.best_model_checkpoint).name,
    }


BEST_MODEL = golden_of("best_model", best_model, product([BERT, DICT], BEST))


@pytest.mark.parametrize("best", BEST)
@pytest.mark.parametrize("task", [BERT, DICT], ids=lambda task: task.name)
def test_the_best_model_is_there_at_the_end(task: Task, best: str) -> None:
    mine = best_model(OURS, task, best)

    def compare(other: dict[str, Any]) -> None:
        ours = mine["outcome"]
        theirs = other["outcome"]
        assert other["step"] < theirs.global_step, "the row says nothing: the last model is the best"
        assert mine["step"] == other["step"]
        assert mine["metric"] == pytest.approx(other["metric"], rel=1e-6)
        assert mine["checkpoint"] == other["checkpoint"]
        assert_same_log(ours.log, theirs.log)
        assert differing(ours.weights, theirs.weights) == {}

    BEST_MODEL.check(f"{task.name}-{best}", compare)


PREDICTING: dict[str, dict[str, Any]] = {
    "whole": {},
    "eval_accumulation_steps": {"eval_accumulation_steps": 2},
    "batches-of-5": {"per_device_eval_batch_size": 5},
}
PREDICTED = (*CLASSIFIERS, PADDED, LLAMA)


def predictions(side: Side, task: Task, how: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        one = trainer(task, side, Path(folder), **PREDICTING[how])
        side.train(one)
        found = one.predict(task.items(50)[26:])
    metrics = without_clock([found.metrics])[0]
    return {"predictions": found.predictions, "label_ids": found.label_ids, "metrics": metrics}


PREDICTIONS = golden_of("predictions", predictions, product(PREDICTED, PREDICTING))


@pytest.mark.parametrize("task", PREDICTED, ids=lambda task: task.name)
@pytest.mark.parametrize("how", PREDICTING)
def test_predictions_are_equal(task: Task, how: str) -> None:
    ours = predictions(OURS, task, how)
    # Batches of 5 leave one of 4: the mean over batches is not the mean over items.
    close = 1e-2 if "per_device_eval_batch_size" in PREDICTING[how] else 1e-6

    def compare(theirs: dict[str, Any]) -> None:
        assert are_equal(ours["predictions"], theirs["predictions"])
        assert are_equal(ours["label_ids"], theirs["label_ids"])
        assert_same_log([ours["metrics"]], [theirs["metrics"]], close=close)

    PREDICTIONS.check(f"{task.name}-{how}", compare)


def test_evaluating_leaves_the_weights_and_the_random_state_alone(tmp_path: Path) -> None:
    """Ours only: with dropout, a run that evaluates ends with the weights of one that does not."""
    plain = OURS.train(trainer_of(Row(BERT, "plain", dropout=0.2), OURS, tmp_path / "plain"))
    row = Row(BERT, "evaluated", dropout=0.2, parts=evaluated(BERT))
    judged = OURS.train(trainer_of(row, OURS, tmp_path / "judged", eval_strategy="steps", eval_steps=3))
    assert differing(judged.weights, plain.weights) == {}
