"""Rows: filled by best fit, with every token once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.capabilities.packing.packed_rows import PackedDataset, PackedOrder, best_fit_decreasing
from trainwright.errors import DataError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def test_lengths_that_are_none_are_refused() -> None:
    with pytest.raises(DataError, match="Sample 1 of the training data has 0 tokens"):
        PackedOrder([3, 0], 8, 1, seed=0)


def test_a_wrong_column_of_lengths_shows_when_the_sample_is_read() -> None:
    dataset = PackedDataset([{"input_ids": [1, 2, 3]}], "input_ids", splits_long=False)
    with pytest.raises(DataError, match="Sample 0 should have 2 tokens, but has 3"):
        dataset[[[(0, 0, 2)]]]


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """What is free in each row, by the definition."""
    free: list[int] = []
    for length in lengths:
        fits = [i for i, room in enumerate(free) if room >= length]
        if not fits:
            free.append(capacity)
            fits = [len(free) - 1]
        free[min(fits, key=free.__getitem__)] -= length
    return sorted(free)


@given(LENGTHS, st.integers(40, 100))
def test_rows_are_filled_by_best_fit(lengths: list[int], capacity: int) -> None:
    ordered = sorted(lengths, reverse=True)
    used = np.bincount(best_fit_decreasing(ordered, capacity), weights=ordered)
    assert sorted((capacity - used).astype(int).tolist()) == plain_best_fit(ordered, capacity)


@given(LENGTHS, st.integers(5, 60), st.integers(1, 4), st.integers(0, 3))
def test_every_token_is_packed_once(lengths: list[int], row_length: int, rows_per_batch: int, epoch: int) -> None:
    order = PackedOrder(lengths, row_length, rows_per_batch, seed=1, splits_long=True)
    batches = list(order.indices(epoch))
    assert len(batches) == len(order)
    rows = [row for batch in batches for row in batch]
    assert all(sum(stop - start for _, start, stop in row) <= row_length for row in rows)
    tokens = [(index, i) for row in rows for index, start, stop in row for i in range(start, stop)]
    assert sorted(tokens) == [(index, i) for index, length in enumerate(lengths) for i in range(length)]


def test_rows_are_full() -> None:
    lengths = np.random.default_rng(0).lognormal(3.2, 1.1, 4000).astype(int).clip(1, 512)
    assert lengths.sum() / PackedOrder(lengths, 512, 4, seed=0).num_tokens(0) > 0.99
