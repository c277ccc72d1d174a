"""Metrics that are not plain numbers: converted, or named before step 1 and left out of the record of the run."""

from __future__ import annotations

import json
import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainwright import TrainerCallback
from trainwright.errors import DataError, MetricError
from trainwright.journal import record

from .._support.small import OURS, REFERENCE, data, logged, make_trainer

ARRAY = np.arange(3)
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
KEPT: list[tuple[str, Any, Any]] = [  # name, value, in the record
    ("zero_dim", np.array(0.5), 0.5),
    ("one_element", np.ones(1), 1.0),
    ("matrix", torch.ones(1, 1), 1.0),
    ("numpy", np.float32(0.5), 0.5),
    ("integer", np.int64(3), 3),
    ("graph", torch.ones((), requires_grad=True), 1.0),
    ("text", "good", "good"),
    ("list", [np.float64(1.0), 2], [1.0, 2]),
    ("dict", {"a": 1}, {"a": 1}),
    ("none", None, None),
]
DROPPED: list[tuple[str, Any, str]] = [  # name, value, in the warning
    ("array", ARRAY, "a ndarray of shape (3,)"),
    ("tensor", torch.ones(2, 2), "a Tensor of shape (2, 2)"),
    ("complex", 1j, "a complex"),
    ("set", {1}, "a set"),
    ("arrays", {"a": [ARRAY]}, "a dict"),
]
SAVES = {"save_strategy": "steps", "save_steps": 1, "report_to": "none"}
EVALUATES = SAVES | {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": data.vectors(4)}


class Logs(TrainerCallback):
    """Logs values after the first step, and notes what the log said before it."""

    def __init__(self, values: dict[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
        self.values = values
        self.caplog = caplog
        self.trainer: Any = None
        self.said_before = ""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.said_before = self.caplog.text
        elif self.values:
            self.trainer.log(self.values)
            self.values = {}


def run(folder: Path, caplog: pytest.LogCaptureFixture, logs: dict[Any, Any], **parts: Any) -> tuple[Any, Logs]:
    callback = Logs(logs, caplog)
    callback.trainer = trainer = make_trainer(folder, callbacks=[callback], max_steps=2, **parts)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer.train()
    return trainer, callback


def test_metrics_of_any_kind_train_and_are_named_before_step_1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = {name: value for name, value, _ in KEPT + DROPPED}
    later: dict[Any, Any] = {**{f"my_{name}": value for name, value in metrics.items()}, "me": ITSELF, 7: 0.5}
    trainer, callback = run(tmp_path, caplog, later, compute_metrics=lambda p: dict(metrics), **EVALUATES)
    for name, _, what in DROPPED:
        assert f"eval_{name} is {what}, which the record of a run cannot hold" in callback.said_before
        assert caplog.text.count(f"metric eval_{name} is") == 1, "once"
        assert f"my_{name} is {what}" in caplog.text
        assert logged(trainer, f"eval_{name}") == logged(trainer, f"my_{name}") == []
    assert "The metric 7 is named by a int" in caplog.text
    assert "The metric me is a list" in caplog.text
    for name, _, value in KEPT:
        assert logged(trainer, f"eval_{name}") == [value, value]
        assert logged(trainer, f"my_{name}") == [value]
        assert f"{name} is" not in caplog.text
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["log_history"] == trainer.state.log_history[:-1]  # the last one came after it
    journal = record.read(tmp_path)
    assert journal.series("eval_one_element")[0] == [1, 2]
    assert "my_text" in journal.values
    assert "cannot be written" not in caplog.text
    assert (trainer.evaluate()["eval_array"] == ARRAY).all(), "the caller gets what compute_metrics returned"


@pytest.mark.framework
def test_what_the_original_keeps_in_its_record_is_kept(tmp_path: Path) -> None:
    metrics = {"text": "good", "list": [1, "a"], "dict": {"a": 1}, "none": None, "number": np.float64(0.5)}
    ours, theirs = (
        make_trainer(tmp_path / s.name, s, compute_metrics=lambda p: dict(metrics), max_steps=2, **EVALUATES)
        for s in (OURS, REFERENCE)
    )
    for trainer in (ours, theirs):
        trainer.train()
    for name in metrics:
        assert logged(ours, f"eval_{name}") == logged(theirs, f"eval_{name}")


BAD_BEST: list[Any] = ["good", [1, 2], ARRAY, {"a": 1}, 1j]


@pytest.mark.parametrize("value", BAD_BEST, ids=[type(value).__name__ for value in BAD_BEST])
def test_a_deciding_metric_that_is_not_a_number(value: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, compute_metrics=lambda p: {"m": value}, metric_for_best_model="m", **EVALUATES)
    with pytest.raises(MetricError, match=rf"'m'.*eval_m=.*not a number \({type(value).__name__}\)"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("value", [None, float("nan"), "good", ARRAY], ids=["None", "nan", "text", "array"])
def test_a_metric_that_stops_being_a_number_is_never_the_best(
    value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = iter([0.5, value, 0.25, value])  # the first one is that of the dry run
    trainer, _ = run(
        tmp_path,
        caplog,
        {},
        compute_metrics=lambda p: {"m": next(values)},
        metric_for_best_model="m",
        greater_is_better=True,
        load_best_model_at_end=True,
        **EVALUATES,
    )
    assert trainer.state.best_metric == 0.25
    assert trainer.state.best_global_step == 2
    assert "eval_m is" in caplog.text
    assert "never the best" in caplog.text


@pytest.mark.parametrize("value", [Fraction(1, 2), [0.5], np.array([0.5])], ids=["fraction", "list", "array"])
def test_one_number_in_a_wrapping_can_decide(value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = run(
        tmp_path, caplog, {}, compute_metrics=lambda p: {"m": value}, metric_for_best_model="m", **EVALUATES
    )
    assert trainer.state.best_metric == 0.5


def test_a_best_metric_of_a_checkpoint_that_is_nan_is_beaten(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, metric_for_best_model="loss")
    trainer.state.best_metric = float("nan")
    assert trainer._determine_best_metric({"eval_loss": 3.0}, None)
    assert not trainer._determine_best_metric({"eval_loss": 4.0}, None)
    assert trainer.state.best_metric == 3.0


@pytest.mark.parametrize("name", [1, None, ("a", 1)], ids=repr)
def test_a_name_of_a_metric_is_text(name: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, compute_metrics=lambda p: {name: 0.5}, **EVALUATES)
    with pytest.raises(DataError, match=r"a metric named .*; names are text"):
        trainer.train()
    assert trainer.state.global_step == 0


class HasState(TrainerCallback):
    """Another callback's state that JSON cannot hold."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": {1, 2}}}


def test_the_record_is_written_whatever_others_put_into_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, callbacks=[HasState()], **SAVES)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer.train()
    saved = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert "HasState" not in saved["stateful_callbacks"]
    assert "TrainerControl" in saved["stateful_callbacks"]
    assert "HasState (a dict)" in caplog.text


def test_entries_that_were_not_logged_are_written_without_what_json_cannot_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.state.log_history.append({"mine": ARRAY, "other": np.float64(1.0)})
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer.save_state()
    assert json.loads((tmp_path / "trainer_state.json").read_text())["log_history"] == [{"other": 1.0}]
    assert "mine" in caplog.text


def test_results_that_json_cannot_hold_are_saved_without_them(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.save_metrics("eval", {"eval_array": ARRAY, "eval_one": np.ones(1)})
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"eval_one": 1.0}
