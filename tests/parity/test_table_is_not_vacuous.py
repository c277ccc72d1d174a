"""The rows of the table do what they say: the original learns, and each setting shows in its result."""

import pytest

from .golden import MARKS
from .rows import ROWS, Row, plain
from .sides import differing, weights
from .test_same_weights import GOLDEN

pytestmark = MARKS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_reference_learns_and_its_loss_moves(row: Row) -> None:
    outcome = GOLDEN.result(row.id)
    if row.model_from_init is None:
        before = weights(row.task.build(row.dropout))
        assert len(differing(outcome.weights, before)) > len(before) // 5
    losses = outcome.losses()
    assert len(set(losses)) == len(losses), "the loss stood still"
    assert losses or row.args.get("logging_strategy") == "no"
    assert all(loss > 0 for loss in losses)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.model_from_init], ids=lambda row: row.id)
def test_the_setting_shows_in_the_result_of_the_reference(row: Row) -> None:
    with_it = GOLDEN.result(row.id)
    without = GOLDEN.result(plain(row.task, row.size).id)
    assert bool(differing(with_it.weights, without.weights)) == (row.changes == "weights")
    assert (with_it.log != without.log) == (row.changes != "nothing")
