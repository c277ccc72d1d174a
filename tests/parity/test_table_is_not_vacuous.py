"""The rows of the table do what they say: the reference learns, and each setting shows in its result."""

import pytest
import torch

from .rows import ROWS, Row, plain
from .run import reference, train
from .sides import REFERENCE, differing, weights

RANDOM = ("dropout", "group-by-length-dropout", "model-init", "stream-dropout")
ONCE_MORE = [row for row in ROWS if row.setting in RANDOM]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_reference_learns_and_its_loss_moves(row: Row) -> None:
    outcome = reference(row)
    if row.model_from_init is None:
        before = weights(row.task.build(row.dropout))
        assert len(differing(outcome.weights, before)) > len(before) // 5
    assert all(torch.isfinite(value).all() for value in outcome.weights.values())
    losses = outcome.losses()
    assert len(set(losses)) == len(losses), "the loss stood still"
    assert losses or row.args.get("logging_strategy") == "no"
    assert all(loss > 0 for loss in losses)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.model_from_init], ids=lambda row: row.id)
def test_the_setting_shows_in_the_result_of_the_reference(row: Row) -> None:
    with_it, without = reference(row), reference(plain(row.task, row.size))
    assert bool(differing(with_it.weights, without.weights)) == (row.changes == "weights")
    assert (with_it.log != without.log) == (row.changes != "nothing")


@pytest.mark.parametrize("row", ONCE_MORE, ids=lambda row: row.id)
def test_the_reference_repeats_itself(row: Row) -> None:
    assert differing(train(row, REFERENCE).weights, reference(row).weights) == {}
