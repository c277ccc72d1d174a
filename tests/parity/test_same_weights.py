"""Every row of the table: all weights bit for bit, every logged number equal."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import trainwright

from .golden import MARKS
from .rows import BERT, FROZEN, LOSS, PADDED, ROWS, T5, Row, own_loss, plain
from .run import assert_same_as_the_original, originals, train
from .sides import OURS, Outcome, assert_same, differing

pytestmark = MARKS

# Also what the rows are held against in test_table_is_not_vacuous.py.
GOLDEN = originals("rows", dict.fromkeys([*ROWS, *(plain(row.task, row.size) for row in ROWS)]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_training_ends_with_the_weights_and_the_log_of_transformers(row: Row) -> None:
    assert_same_as_the_original(row, GOLDEN)


@pytest.mark.parametrize("row", [row for row in LOSS if row.setting == "plain"], ids=lambda row: row.id)
def test_without_accumulation_the_default_is_the_same(row: Row) -> None:
    ours = train(row, OURS, loss_weighting=None)
    GOLDEN.check(row.id, partial(assert_same, ours))


# Those that a run in whole batches can be compared with: a random collator and dropout draw for each batch.
HEADS = [
    row
    for row in ROWS
    if row.task in (BERT, PADDED, T5, FROZEN)
    and "gradient_accumulation_steps" in row.args
    and row.dropout == 0
    and "train_sampling_strategy" not in row.args
    and row.model_from_init is None
    and row.parts is not own_loss
]


@pytest.mark.parametrize("row", HEADS, ids=lambda row: row.id)
def test_by_default_accumulation_is_one_batch_for_heads_that_ignore_the_count(row: Row) -> None:
    """With plain SGD: Adam turns a gradient that is rounded to nothing into a whole step."""
    sgd = {"optim": "sgd", "learning_rate": 0.1}
    micro_batches = row.args["gradient_accumulation_steps"]
    whole = {"per_device_train_batch_size": 4 * micro_batches, "gradient_accumulation_steps": 1}
    one = train(row, OURS, **sgd, **whole)
    many = train(row, OURS, **sgd, loss_weighting=None)
    torch.testing.assert_close(many.losses(), one.losses(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(many.weights, one.weights, rtol=0, atol=1e-6)


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
    *kept, trained = (differing(ours.weights, theirs.weights) for theirs in compared)
    assert trained.keys() >= {"classifier.weight"}
    assert [one.keys() for one in kept] in ([], [trained.keys()])  # no result is kept for some processors
    assert all(0 < gap < 0.1 for gap in trained.values())
