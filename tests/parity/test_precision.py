"""bf16 autocast on the CPU: the same weights, bit for bit, whoever computes the loss."""

import pytest

from .golden import MARKS
from .rows import ALL, BERT, DICT, LLAMA, T5, TUPLE, Row, each, own_loss, seq2seq
from .run import assert_same_as_the_original, originals

pytestmark = [*MARKS, pytest.mark.costly]

ROWS: list[Row] = [
    *each(ALL, "bf16", bf16=True),
    *each((BERT, LLAMA, T5, DICT), "bf16-dropout-accumulated", bf16=True, dropout=0.2, gradient_accumulation_steps=4),
    *each((BERT, LLAMA), "bf16-label-smoothing", bf16=True, label_smoothing_factor=0.2),
    *each((T5,), "bf16-label-smoothing", bf16=True, label_smoothing_factor=0.2, parts=seq2seq),
    *each((BERT, DICT, TUPLE), "bf16-own-loss", bf16=True, parts=own_loss),
]
GOLDEN = originals("precision", ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_mixed_precision_ends_with_the_weights_and_the_log_of_transformers(row: Row) -> None:
    assert_same_as_the_original(row, GOLDEN)
