"""Every row of the table: all weights bit for bit, every logged number equal."""

import pytest

from .rows import ROWS, Row
from .run import reference, train
from .sides import OURS, assert_same


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_training_ends_with_the_weights_and_the_log_of_transformers(row: Row) -> None:
    assert_same(train(row, OURS), reference(row))
