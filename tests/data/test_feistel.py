"""A shuffled order that is computed, not stored."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.data.batches import EpochBatches
from trainwright.data.order import FeistelOrder


@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 4))
def test_each_sample_once_and_the_same_again(size: int, seed: int, epoch: int) -> None:
    order = FeistelOrder(size, seed)
    indices = list(order.indices(epoch))
    assert sorted(indices) == [*range(size)]
    assert list(order.indices(epoch)) == indices


@pytest.mark.parametrize("first", [0, 1, 8191, 8192, 8193, 19_999, 20_000])
def test_from_every_position(first: int) -> None:
    order = FeistelOrder(20_000, 3)
    assert list(order.indices_from(1, first)) == list(order.indices(1))[first:]


def test_epochs_and_seeds_differ() -> None:
    orders = [list(FeistelOrder(1000, seed).indices(epoch)) for seed in (1, 2) for epoch in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def test_it_looks_shuffled() -> None:
    """Where a sample goes says nothing of where it was, and neighbours part."""
    size = 100_000
    order = np.array(list(FeistelOrder(size, 5).indices(0)))
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.02
    assert abs(np.diff(order.astype(float)) / size).mean() == pytest.approx(1 / 3, abs=0.01)
    fixed = int((order == np.arange(size)).sum())
    assert fixed < 12, "a random permutation has one fixed point on average"
    counts = np.histogram(order[: size // 10], bins=20, range=(0, size))[0]
    assert abs(counts - 500).max() < 120


def test_a_hundred_million_rows_start_at_once_anywhere() -> None:
    size = 100_000_000
    batches = EpochBatches(FeistelOrder(size, 3), 8)
    batches.seek(2, size - 20)
    assert [len(batch) for batch in batches] == [8, 8, 4]
    batches.seek(0, 90_000_000)
    assert len(set(next(iter(batches)))) == 8
