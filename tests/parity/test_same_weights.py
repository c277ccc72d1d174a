"""Every row of the table: all weights bit for bit, every logged number equal."""

from dataclasses import replace
from typing import Any

import pytest

import trainwright

from .golden import MARKS
from .rows import BERT, ROWS, Row, plain
from .run import assert_same_as_the_original, originals, train
from .sides import OURS, Outcome, assert_same, differing

pytestmark = MARKS

# Also what the rows are held against in test_table_is_not_vacuous.py.
GOLDEN = originals("rows", dict.fromkeys([*ROWS, *(plain(row.task, row.size) for row in ROWS)]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_training_ends_with_the_weights_and_the_log_of_transformers(row: Row) -> None:
    assert_same_as_the_original(row, GOLDEN)


class SteeperLoss(trainwright.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 1.0001


class HigherRate(trainwright.Trainer):
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.args.learning_rate *= 1.0001
        return super().create_optimizer(*args, **kwargs)


@pytest.mark.framework
@pytest.mark.parametrize("changed", [SteeperLoss, HigherRate])
def test_a_trainer_with_other_numbers_does_not_pass(changed: type[trainwright.Trainer]) -> None:
    """The kept result tells which parameters differ, the original trained beside it by how much."""
    row = plain(BERT, Row.size)
    ours = train(row, replace(OURS, trainer=changed))
    compared: list[Outcome] = []

    def compare(theirs: Outcome) -> None:
        compared.append(theirs)
        assert_same(ours, theirs)

    with pytest.raises(AssertionError):
        GOLDEN.check(row.id, compare)
    kept, trained = (differing(ours.weights, theirs.weights) for theirs in compared)
    assert kept.keys() == trained.keys() >= {"classifier.weight"}
    assert all(0 < gap < 0.1 for gap in trained.values())
