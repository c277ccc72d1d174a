"""Orders of samples: those of the original, from any position, each sample once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler as OriginalSampler

from trainwright import LengthGroupedSampler, get_length_grouped_indices
from trainwright.data.batches import EpochBatches
from trainwright.data.order import SamplerOrder, ShuffledOrder
from trainwright.errors import DataError

from .._support.small import OURS, REFERENCE, Diary, data, make_trainer

SIZES = st.integers(1, 40)


# -- the shuffled order ----------------------------------------------------------------------------------------------


@given(SIZES, st.integers(0, 2**40), st.integers(0, 5))
def test_each_sample_once_and_the_same_again(size: int, seed: int, epoch: int) -> None:
    order = ShuffledOrder(size, seed)
    indices = list(order.indices(epoch))
    assert sorted(indices) == list(range(size)) == list(range(len(order)))
    assert list(order.indices(epoch)) == indices


@given(st.integers(0, 1000), st.integers(0, 5))
def test_it_depends_on_nothing_but_seed_and_epoch(seed: int, epoch: int) -> None:
    torch.manual_seed(seed + epoch)
    state = torch.get_rng_state()
    one = list(ShuffledOrder(30, seed).indices(epoch))
    assert torch.equal(torch.get_rng_state(), state)
    assert list(ShuffledOrder(30, seed + 1).indices(epoch)) != one
    assert list(ShuffledOrder(30, seed).indices(epoch + 1)) != one


@pytest.mark.framework
@pytest.mark.parametrize(
    "settings",
    [{}, {"seed": 5}, {"data_seed": 9}, {"dataloader_drop_last": True}, {"gradient_accumulation_steps": 3}],
    ids=str,
)
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_order_in_which_the_original_reads(settings: dict[str, Any], epochs: int, tmp_path: Path) -> None:
    """Over several epochs, read from the dataset's own diary."""
    reads = []
    for side in (OURS, REFERENCE):
        diary = Diary(data.vectors(26))
        make_trainer(tmp_path, side, train_dataset=diary, num_train_epochs=epochs, **settings).train()
        reads.append(diary.reads)
    assert reads[0] == reads[1]
    assert len(reads[0]) == epochs * (24 if "dataloader_drop_last" in settings else 26)


# -- positions -------------------------------------------------------------------------------------------------------


@given(SIZES, st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_seeking_gives_the_tail_of_the_full_epoch(size: int, batch_size: int, drop_last: bool, epoch: int) -> None:
    batches = EpochBatches(ShuffledOrder(size, 3), batch_size, drop_last=drop_last)
    batches.seek(epoch)
    whole = list(batches)
    assert len(whole) == len(batches)
    for position in range(len(whole) + 2):
        batches.seek(epoch, position * batch_size)
        assert list(batches) == whole[position:]


@given(SIZES, st.integers(1, 7), st.integers(0, 40))
def test_seeking_a_sample_in_the_middle_of_a_batch(size: int, batch_size: int, sample: int) -> None:
    """As a resume with another batch size does: what follows is what was not yet seen."""
    batches = EpochBatches(ShuffledOrder(size, 3), batch_size)
    batches.seek(2)
    whole = [index for batch in batches for index in batch]
    batches.seek(2, sample)
    assert [index for batch in batches for index in batch] == whole[sample:]


@given(SIZES, st.integers(1, 7))
def test_drop_last_drops_incomplete_batches(size: int, batch_size: int) -> None:
    kept = list(EpochBatches(ShuffledOrder(size, 0), batch_size, drop_last=True))
    every = list(EpochBatches(ShuffledOrder(size, 0), batch_size))
    assert kept == [batch for batch in every if len(batch) == batch_size]


def test_a_plain_loop_over_epochs_gets_a_new_order_each_time() -> None:
    batches = EpochBatches(ShuffledOrder(12, 7), 4)
    first = list(batches)
    second = list(batches)
    assert first != second
    batches.set_epoch(1)
    assert list(batches) == second


def test_what_was_abandoned_in_the_middle_does_not_move_the_next_epoch() -> None:
    batches = EpochBatches(ShuffledOrder(12, 7), 4)
    batches.seek(1)
    expected = list(batches)
    batches.seek(0, 4)
    next(iter(batches))
    assert list(batches) == expected


# -- samplers of others ----------------------------------------------------------------------------------------------


class Draws(Sampler[int]):
    """An order from torch's global generator."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10).tolist())


def test_an_order_can_be_drawn_before_its_first_batch() -> None:
    """A resume sets other random states between drawing the order and reading the first batch."""
    torch.manual_seed(1)
    first = [i for batch in EpochBatches(SamplerOrder(Draws()), 3) for i in batch]
    torch.manual_seed(1)
    again = EpochBatches(SamplerOrder(Draws()), 3)
    again.seek(0, 3)
    again.draw()
    torch.manual_seed(2)
    assert [i for batch in again for i in batch] == first[3:]
    assert [i for batch in again for i in batch] != first, "the next epoch draws anew"


def test_a_sampler_is_told_the_epoch() -> None:
    class Epochs(Draws):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler = Epochs()
    list(SamplerOrder(sampler).indices(4))
    assert sampler.epoch == 4


@pytest.mark.parametrize(
    "sampler", [RandomSampler(range(10), num_samples=25), RandomSampler(range(10), replacement=True)]
)
def test_a_random_sampler_with_wishes_of_its_own_keeps_them(sampler: Any, tmp_path: Path) -> None:
    diary = Diary(data.vectors(10))
    trainer = make_trainer(tmp_path, train_dataset=diary, num_train_epochs=1)
    trainer._get_train_sampler = lambda dataset=None: sampler
    trainer.train()
    assert len(diary.reads) == len(sampler)
    assert len(set(diary.reads)) < len(sampler)


# -- grouped by length -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 8, 50])
@pytest.mark.parametrize("size", [1, 3, 17, 400])
@pytest.mark.parametrize("with_generator", [False, True])
def test_the_same_order_as_the_original(size: int, batch_size: int, with_generator: bool) -> None:
    draw = random.Random(size)
    lengths = [draw.randint(1, 30) for _ in range(size)]
    orders = []
    for cls in (LengthGroupedSampler, OriginalSampler):
        torch.manual_seed(4)
        generator = torch.Generator().manual_seed(8) if with_generator else None
        orders.append(list(cls(batch_size, lengths=list(lengths), generator=generator)))
    assert orders[0] == orders[1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 9), st.none() | st.integers(1, 4))
def test_a_permutation_with_the_longest_first(lengths: list[int], batch_size: int, multiple: int | None) -> None:
    order = get_length_grouped_indices(lengths, batch_size, mega_batch_mult=multiple)
    assert sorted(order) == list(range(len(lengths)))
    assert lengths[order[0]] == max(lengths)


def test_neighbours_have_similar_lengths() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 100) for _ in range(800)]

    def padding(order: list[int]) -> int:
        batches = [[lengths[i] for i in order[k : k + 8]] for k in range(0, 800, 8)]
        return sum(max(batch) * len(batch) - sum(batch) for batch in batches)

    assert padding(list(LengthGroupedSampler(8, lengths=lengths))) < 0.2 * padding(list(range(800)))


def test_lengths_from_a_dataset_a_tensor_or_a_list() -> None:
    items = data.ragged_texts(20)
    lengths = [len(item["input_ids"]) for item in items]
    assert LengthGroupedSampler(4, dataset=items).lengths == lengths
    assert LengthGroupedSampler(4, lengths=torch.tensor(lengths)).lengths == lengths
    assert LengthGroupedSampler(4, dataset=items, model_input_name="attention_mask").lengths == lengths


def test_a_dataset_that_never_raises_index_error() -> None:
    """Its length is asked, not found by trial."""

    class Cyclic(Diary):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return super().__getitem__(index % len(self.items))

    cyclic = Cyclic(data.ragged_texts(6))
    assert len(LengthGroupedSampler(2, dataset=cyclic)) == 6
    assert cyclic.reads == list(range(6))


def test_without_lengths_it_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="needs lengths, or a dataset"):
        LengthGroupedSampler(4)
    with pytest.raises(DataError, match=r"'input_ids'.*item 0 has .*labels.*x.*length_column_name"):
        LengthGroupedSampler(4, dataset=data.vectors(3))
    with pytest.raises(DataError, match="has a str"):
        LengthGroupedSampler(4, dataset=["text"])
