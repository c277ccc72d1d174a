"""Processes that share an order: accelerate's layout where it divides, every sample once and equal steps where not."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler
from transformers import default_data_collator

from trainwright._types import TailBatch
from trainwright.config.plans import LoaderPlan
from trainwright.data.batches import EpochBatches, MarksSeed
from trainwright.data.dataloader import build_dataloader, build_whole
from trainwright.data.order import ShuffledOrder
from trainwright.data.shards import RankShare
from trainwright.errors import DataError

SIZES = st.integers(1, 70)
BATCHES = st.integers(1, 5)
PROCESSES = st.integers(1, 5)


def of_all(size: int, batch_size: int, num: int, *, even: bool = True, drop_last: bool = False) -> list[EpochBatches]:
    shares = [RankShare(batch_size=batch_size, rank=rank, num_processes=num, even=even) for rank in range(num)]
    return [EpochBatches(ShuffledOrder(size, 3), batch_size, drop_last=drop_last, share=share) for share in shares]


def original(size: int, batch_size: int, num: int, rank: int, **options: Any) -> list[list[int]]:
    sampler = SeedableRandomSampler(range(size), data_seed=3)
    whole = BatchSampler(sampler, batch_size, drop_last=options.pop("drop_last", False))
    return list(BatchSamplerShard(whole, num, rank, **options))


@given(st.integers(1, 9), BATCHES, PROCESSES)
def test_where_it_divides_it_is_accelerates(chunks: int, batch_size: int, num: int) -> None:
    size = chunks * batch_size * num
    for rank, batches in enumerate(of_all(size, batch_size, num)):
        assert list(batches) == original(size, batch_size, num, rank)
        assert batches.last_part() is None


@given(st.integers(1, 9), BATCHES, PROCESSES)
def test_a_batch_cut_for_all_is_accelerates(chunks: int, batch_size: int, num: int) -> None:
    size = chunks * batch_size * num
    for rank, batches in enumerate(of_all(size, batch_size, num)):
        assert list(batches) == original(size, batch_size * num, num, rank, split_batches=True)


@given(SIZES, BATCHES, PROCESSES)
def test_the_tail_that_is_dropped_is_accelerates(size: int, batch_size: int, num: int) -> None:
    for rank, batches in enumerate(of_all(size, batch_size, num, drop_last=True)):
        expected = original(size, batch_size, num, rank, drop_last=True)
        assert list(batches) == expected
        assert len(batches) == len(expected)


@given(SIZES, BATCHES, PROCESSES)
def test_a_tail_that_is_not_evened_is_that_of_accelerate(size: int, batch_size: int, num: int) -> None:
    for rank, batches in enumerate(of_all(size, batch_size, num, even=False)):
        expected = original(size, batch_size, num, rank, even_batches=False)
        part = batches.last_part()
        ours = list(batches)
        assert ours[: len(expected)] == expected
        assert len(ours) - len(expected) == int(part is not None and part.num_samples == 0)


@given(SIZES, BATCHES, PROCESSES, st.booleans(), st.integers(0, 70))
def test_equal_steps_each_sample_once_from_any_position(
    size: int, batch_size: int, num: int, even: bool, first: int
) -> None:
    order = list(ShuffledOrder(size, 3).indices(2))
    counts = set()
    seen = []
    weights = []
    for batches in of_all(size, batch_size, num, even=even):
        part = batches.last_part(first)
        expected = batches.num_batches(first)
        batches.seek(2, first)
        mine = list(batches)
        assert len(mine) == expected
        counts.add(len(mine))
        if part is not None:
            weights.append(part.weight)
            if part.num_samples == 0:
                assert len(mine.pop()) == 1
        seen += [index for batch in mine for index in batch]
    assert len(counts) == 1
    assert sorted(seen) == sorted(order[first:])
    assert not weights or abs(sum(weights) - num) < 1e-9, "the mean over processes is the mean over samples"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_batch_says_that_it_is_of_a_tail(workers: int) -> None:
    items = [{"x": torch.tensor([float(i)]), "labels": i} for i in range(9)]
    seen = []
    for rank in range(2):
        plan = LoaderPlan(batch_size=4, seed=3, is_training=True, rank=rank, num_processes=2, workers=workers)
        loader = build_dataloader(items, plan, sampler=RandomSampler(items), collate=default_data_collator)
        assert len(loader) == 2
        for _ in range(2):  # a second pass too
            first, last = list(loader)
            assert type(first) is dict
            assert isinstance(last, TailBatch)
            assert (last.num_samples, last.weight) == ((1, 2.0) if rank == 0 else (0, 0.0))
        seen.append(last)
    assert set(seen[0]) == {"x", "labels"}
    again = pickle.loads(pickle.dumps(seen[0]))
    assert (again.num_samples, again.weight) == (1, 2.0)


@pytest.mark.parametrize("build", [build_dataloader, build_whole])
def test_a_stream_that_is_split_already_is_refused(build: Any) -> None:
    stream = IterableDataset.from_generator(lambda: ({"labels": i} for i in range(8)))
    plan = LoaderPlan(batch_size=2, seed=3, is_training=True, rank=1, num_processes=2)
    build(stream, plan, sampler=None, collate=default_data_collator)
    half = split_dataset_by_node(stream, rank=1, world_size=2)
    with pytest.raises(DataError, match="Pass the stream before the split"):
        build(half, plan, sampler=None, collate=default_data_collator)
    build(half, replace(plan, rank=0, num_processes=1), sampler=None, collate=default_data_collator)


def test_workers_of_different_processes_draw_differently() -> None:
    origins = []
    for rank in range(2):
        share = RankShare(batch_size=2, rank=rank, num_processes=2)
        batches = EpochBatches(ShuffledOrder(12, 3), 2, share=share, mark=MarksSeed(5, share))
        origins += [batch.origin for batch in batches]  # type: ignore[attr-defined]
    assert len(set(origins)) == 6
