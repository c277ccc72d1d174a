"""Lengths of samples, and what is formed by them: read without reading items, and as good as what it replaces."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.trainer_pt_utils import BatchRebalanceSampler as OriginalRebalance

from trainwright import BatchRebalanceSampler
from trainwright.data.balanced_batches import cost
from trainwright.data.length_sampler import check_lengths, lengths_digest, sample_lengths

SOME = [3, 9, 16, 2, 5, 5, 12, 1, 7, 4]


def table(**columns: list[Any]) -> Any:
    return datasets.Dataset.from_dict({"input_ids": [[0] * length for length in SOME], **columns})


# -- reading lengths -------------------------------------------------------------------------------------------------


def unread(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The dataset, whose items nobody may read."""

    def read(*_: Any) -> None:
        raise AssertionError("an item was read")

    monkeypatch.setattr(type(dataset), "__getitem__", read)
    monkeypatch.setattr(type(dataset), "__getitems__", read)
    return dataset


def test_arrow_knows_them_without_reading_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = table().shuffle(seed=3).select(range(2, 9))
    expected = [len(item["input_ids"]) for item in chosen]
    joined = datasets.concatenate_datasets([table(), table()])
    assert sample_lengths(unread(chosen, monkeypatch), "input_ids").tolist() == expected
    assert sample_lengths(joined, "input_ids").tolist() == SOME * 2
    assert sample_lengths(table().with_format("torch"), "input_ids").tolist() == SOME


def test_a_column_of_lengths_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = table(size=list(range(10))).select([4, 2])
    assert sample_lengths(unread(dataset, monkeypatch), "input_ids", column="size").tolist() == [4, 2]


def test_a_row_without_a_list_has_no_length() -> None:
    """As in the original, which asks each item for its len()."""
    with pytest.raises(TypeError, match="NoneType"):
        sample_lengths(datasets.Dataset.from_dict({"input_ids": [[1, 2], None]}), "input_ids")


def test_items_that_are_made_on_the_fly_are_asked() -> None:
    dataset = table()
    dataset.set_transform(lambda batch: {"input_ids": [row[:2] for row in batch["input_ids"]]})
    assert sample_lengths(dataset, "input_ids").tolist() == [min(length, 2) for length in SOME]


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ([*range(9), None], "1 empty values"),
        ([*map(float, range(9)), float("nan")], "1 empty values"),
        (["long"] * 10, "values of the type string"),
    ],
)
def test_a_column_without_lengths_is_reported_and_ignored(
    column: list[Any], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert sample_lengths(table(size=column), "input_ids", column="size").tolist() == SOME
    assert f"'size' should hold the length of each sample, but has {what}" in caplog.text


def test_fractions_of_lengths_stay_apart() -> None:
    found = sample_lengths(table(size=[n / 4 for n in range(10)]), "input_ids", column="size")
    assert found.tolist() == [n / 4 for n in range(10)]
    assert lengths_digest(found) != lengths_digest([0] * 10)
    assert check_lengths([1.5, 2], 2, setting="", cure="").tolist() == [2, 2]


# -- rebalancing, and sharing a grouped order --------------------------------------------------------------------------


def worst(batches: list[list[list[int]]], lengths: list[int]) -> float:
    """The costs of the slots of all steps, each as high as that of its costliest process."""
    slots = zip(*batches, strict=True)
    return sum(max(cost(len(batch), max(lengths[i] for i in batch)) for batch in slot) for slot in slots)


@pytest.mark.parametrize(("processes", "slots", "size"), [(1, 4, 32), (2, 2, 16), (4, 2, 64), (8, 4, 256)])
def test_steps_have_the_originals_samples_at_the_originals_cost(processes: int, slots: int, size: int) -> None:
    lengths = np.random.default_rng(1).lognormal(3.2, 1.1, 1024).astype(int).clip(1, 512).tolist()
    settings = {"dp_size": processes, "grad_accum": slots, "seed": 5}
    ours, theirs = (
        [list(cls(lengths, size, **settings, rank=rank)) for rank in range(processes)]
        for cls in (BatchRebalanceSampler, OriginalRebalance)
    )
    for step in range(len(lengths) // size):
        part = slice(step * slots, (step + 1) * slots)
        samples = [sorted(i for rank in side for batch in rank[part] for i in batch) for side in (ours, theirs)]
        assert samples[0] == samples[1]
    assert worst(ours, lengths) <= 1.05 * worst(theirs, lengths)
    assert len(ours[0]) == len(BatchRebalanceSampler(lengths, size, **settings))


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(0, 8))
def test_rebalancing_leaves_none_out(num: int, processes: int, slots: int, more: int) -> None:
    size = processes * slots + more
    sampler = BatchRebalanceSampler([1 + i % 9 for i in range(num)], size, processes, slots, drop_last=False)
    order = sampler.for_all_processes()
    groups = list(order.indices(0))
    assert len(groups) == len(order)
    assert sorted(i for group in groups for i in group) == list(range(num))
    alone = [
        list(BatchRebalanceSampler([1 + i % 9 for i in range(num)], size, processes, slots, rank=rank, drop_last=False))
        for rank in range(processes)
    ]
    assert {len(batches) for batches in alone} == {len(sampler)}
    assert {i for batches in alone for batch in batches for i in batch} == set(range(num))
