"""Early stopping: the counts of transformers' over any course of a metric."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from trainwright import EarlyStoppingCallback, TrainerControl, TrainerState
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import DefaultFlowCallback

NAN = float("nan")
VALUES = st.lists(st.floats(0, 2, width=16) | st.just(NAN), min_size=1, max_size=12)


def stops_after(cls: Any, values: list[float], args: Any, *, patience: int, threshold: float) -> tuple[int | None, int]:
    """(evaluations until it stops, counter at the end), with the best kept as a trainer keeps it: after the event."""
    callback = cls(patience, threshold)
    state = TrainerState()
    control = TrainerControl()
    for number, value in enumerate(values, start=1):
        callback.on_evaluate(args, state, control, metrics={"eval_loss": value})
        best = state.best_metric
        if (
            isinstance(value, float)
            and value == value
            and (best is None or (value > best if args.greater_is_better else value < best))
        ):
            state.best_metric = value
        if control.should_training_stop:
            return number, callback.early_stopping_patience_counter
    return None, callback.early_stopping_patience_counter


@given(VALUES, st.integers(1, 3), st.sampled_from([0.0, 0.25]), st.booleans(), st.sampled_from(["loss", "eval_loss"]))
def test_it_stops_where_the_original_stops(
    values: list[float], patience: int, threshold: float, greater: bool, name: str
) -> None:
    args = SimpleNamespace(metric_for_best_model=name, greater_is_better=greater)
    values = [0.5, *values]  # the original does not count a NaN before the first number
    ours, theirs = (
        stops_after(cls, values, args, patience=patience, threshold=threshold)
        for cls in (EarlyStoppingCallback, transformers.EarlyStoppingCallback)
    )
    assert ours == theirs


@pytest.mark.parametrize("value", [NAN, None, "good", [1.0, 2.0]], ids=repr)
def test_values_other_than_numbers_are_no_improvement(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
    assert stops_after(EarlyStoppingCallback, [value] * 4, args, patience=3, threshold=0.0) == (3, 3)
    assert "as no improvement: 3 of 3" in caplog.text
    assert repr(value) in caplog.text
    course = [value, 1.0, value, 0.5, value, value, 0.25]
    assert stops_after(EarlyStoppingCallback, course, args, patience=3, threshold=0.0) == (None, 0)


def test_a_metric_that_is_not_there_is_said(caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(metric_for_best_model="f1", greater_is_better=True)
    control = TrainerControl()
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        callback = EarlyStoppingCallback(1)
        callback.on_evaluate(args, TrainerState(), control, metrics={"eval_f1": 1.0})
        callback.on_evaluate(args, TrainerState(), control, metrics={"eval_average_f1": 1.0})
        assert caplog.text == "", "an evaluation beside the one that gives the metric need not"
        for _ in range(2):
            callback.on_evaluate(args, TrainerState(), control, metrics={"eval_loss": 1.0, "epoch": 1})
    assert "eval_f1" in caplog.text
    assert "epoch, eval_loss" in caplog.text
    assert not control.should_training_stop


def test_an_evaluation_after_training_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    # As that of the best model, which `load_best_model_at_end` has loaded.
    args = SimpleNamespace(
        metric_for_best_model="loss", greater_is_better=False, eval_strategy="steps", load_best_model_at_end=True
    )
    callback = EarlyStoppingCallback(1)
    state = TrainerState(best_metric=0.5)
    control = TrainerControl()
    for ends in (False, True):
        callback.on_train_begin(args, state, control)
        callback.on_evaluate(args, state, control, metrics={"eval_loss": 1.0})
        assert callback.early_stopping_patience_counter == 1 + ends
        callback.on_train_end(args, state, control)
        callback.on_evaluate(args, state, control, metrics={"eval_loss": 0.5})
        assert callback.early_stopping_patience_counter == 1 + ends
    assert caplog.text.count("has not improved") == 2


def test_it_says_when_the_last_weights_will_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(metric_for_best_model="loss", eval_strategy="steps", load_best_model_at_end=False)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        EarlyStoppingCallback().on_train_begin(args, TrainerState(), TrainerControl())
    assert "load_best_model_at_end" in caplog.text


def test_a_callback_of_another_library_that_ends_training_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
    handler = CallbackHandler([DefaultFlowCallback, transformers.EarlyStoppingCallback(1)], None, None, None, None)
    state = TrainerState(global_step=8, max_steps=40, best_metric=0.5)
    control = TrainerControl()
    for _ in range(2):
        control = handler.call_event("on_evaluate", args, state, control, metrics={"eval_loss": 1.0})
    assert control.should_training_stop
    assert caplog.text.count("EarlyStoppingCallback ends training after step 8 of 40.") == 1


def test_the_state_is_that_of_transformers() -> None:
    ours = EarlyStoppingCallback(3, 0.1)
    theirs = transformers.EarlyStoppingCallback(3, 0.1)
    ours.early_stopping_patience_counter = theirs.early_stopping_patience_counter = 2
    assert ours.state() == theirs.state()
    assert vars(EarlyStoppingCallback.from_state(theirs.state())) == vars(ours)
