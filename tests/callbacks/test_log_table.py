"""The table on a terminal: a row per evaluation, or per log without one; no line is wider than the terminal."""

from __future__ import annotations

import pytest

from trainwright.callbacks.log_table import REPEATED_AFTER, LogTable

TRAINING = {"loss": "0.5", "grad_norm": "1.2", "learning_rate": "1e-05", "epoch": "1"}
EVALUATION = {"eval_loss": "0.4", "eval_accuracy": "0.9", "epoch": "1"}


def table(*, by_evaluation: bool = True, width: int = 80) -> LogTable:
    return LogTable(by_evaluation=by_evaluation, width=lambda: width)


def test_a_row_per_evaluation_has_the_latest_loss_of_training() -> None:
    made = table()
    assert made.lines("1/9", TRAINING) == []
    assert made.lines("2/9", {**TRAINING, "loss": "0.25"}) == []
    head, row = made.lines("2/9", EVALUATION)
    assert head.split() == ["step", "epoch", "loss", "eval_loss", "eval_accuracy"]
    assert row.split() == ["2/9", "1", "0.25", "0.4", "0.9"]
    assert len(made.lines("3/9", EVALUATION)) == 1, "the head is shown once"


def test_without_evaluations_there_is_a_row_per_log() -> None:
    made = table(by_evaluation=False)
    head, row = made.lines("1/9", TRAINING)
    assert head.split() == ["step", "epoch", "loss", "grad_norm", "learning_rate"]
    assert row.split() == ["1/9", "1", "0.5", "1.2", "1e-05"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_columns_that_do_not_fit_are_left_out_whole(width: int) -> None:
    many = {f"eval_metric_{i}": f"{i / 7:.4g}" for i in range(9)} | EVALUATION
    made = table(width=width)
    head, row = made.lines("1/9", many)
    assert len(head) < width
    assert len(row) < width
    shown = head.split()
    assert shown[:2] == ["step", "epoch"][: len(shown)]
    assert set(row.split()) <= {"1/9", *many.values()}
    assert (len(shown) == len(many) + 1) == (width >= 160)


def test_a_metric_that_appears_later_gets_a_column_and_a_new_head() -> None:
    made = table()
    made.lines("1/9", EVALUATION)
    head, row = made.lines("2/9", {**EVALUATION, "eval_f1": "0.1"})
    assert "eval_f1" in head
    assert row.split()[-1] == "0.1"
    missing = made.lines("3/9", EVALUATION)
    assert len(missing) == 1
    assert missing[0].split()[-1] == "0.9"


def test_other_values_are_named_in_line_and_the_end_has_no_row() -> None:
    made = table()
    assert made.lines("9/9", {"train_loss": "0.3", "epoch": "3"}) == ["train_loss 0.3  epoch 3"]
    assert made.lines("9/9", {"epoch": "3"}) == []


def test_the_head_comes_again_in_a_long_run() -> None:
    made = table()
    numbers = [len(made.lines(f"{i}", EVALUATION)) for i in range(REPEATED_AFTER + 1)]
    assert numbers == [2, *[1] * (REPEATED_AFTER - 1), 2]
