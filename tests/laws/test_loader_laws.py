"""What every loader must hold, whatever it reads: each sample once, the same order again, and from any position."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from trainwright._types import TailBatch
from trainwright.data.cursor import Cursor, LoaderState
from trainwright.data.loader import Loader

from .loaders import KINDS, SIZE, Kind

pytestmark = pytest.mark.costly

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
# Processes take most of the time of these tests; without them each law holds each kind of loader in `make test`.
workers = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.one_in(3))])
processes = pytest.mark.parametrize("num_processes", [1, 2])


def counted(batches: Iterable[Any]) -> list[int]:
    """Samples that count: a batch that stands in has none."""
    return [i for b in batches for i in b["id"] if not (isinstance(b, TailBatch) and b.num_samples == 0)]


def every_rank(kind: Kind, *, workers: int, num_processes: int) -> list[Loader]:
    return [kind.loader(workers=workers, rank=rank, num_processes=num_processes) for rank in range(num_processes)]


@kinds
@workers
@processes
def test_every_sample_once_and_equal_steps(kind: Kind, workers: int, num_processes: int) -> None:
    epochs = [0, 1] if workers == 0 else [1]
    for epoch in epochs:
        batches = [
            list(loader.epoch(epoch)) for loader in every_rank(kind, workers=workers, num_processes=num_processes)
        ]
        assert sorted(counted(itertools.chain(*batches))) == [*range(SIZE)]
        assert len({len(of_rank) for of_rank in batches}) == 1


@kinds
@processes
def test_the_same_order_for_the_same_seed(kind: Kind, num_processes: int) -> None:
    def order() -> list[list[int]]:
        return [counted(loader.epoch(1)) for loader in every_rank(kind, workers=0, num_processes=num_processes)]

    assert order() == order()


@pytest.mark.process
@kinds
def test_workers_change_the_order_only_of_what_they_share(kind: Kind) -> None:
    one, other = (counted(kind.loader(workers=w).epoch(1)) for w in (0, 2))
    assert (one == other) is not kind.shared_by_workers


def trained(loader: Loader, epoch: int, num: int) -> tuple[list[Any], Cursor, LoaderState, dict[str, Any]]:
    """So many batches, and what a checkpoint would keep behind them."""
    batches = loader.epoch(epoch)
    done = []
    for _ in range(num):
        loader.begin_window()
        done.append(next(batches))
    states = loader._states.copy()
    return done, loader.cursor(epoch, num, batches_per_epoch=1000), loader.state(), states


def resumed(loader: Loader, cursor: Cursor, randomness: LoaderState, states: dict[str, Any]) -> Iterable[Any]:
    torch.manual_seed(99)  # nothing may hang on the states of a new process
    random.seed(99)
    epoch, batches = loader.resume(Cursor.from_dict(cursor.to_dict()), randomness)
    return loader.epoch(epoch, skip_batches=batches, after_first=lambda: loader._states.restore(states))


def same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a["id"] == b["id"] and torch.equal(a["drawn"], b["drawn"]) for a, b in pairs)


@kinds
@workers
@processes
@pytest.mark.one_in(3)
def test_stopped_anywhere_and_resumed_it_is_the_same_to_the_bit(kind: Kind, workers: int, num_processes: int) -> None:
    draw = random.Random(f"{kind.name}{workers}{num_processes}")
    epoch = draw.randint(0, 2)
    rank = draw.randrange(num_processes)

    def loader() -> Loader:
        return kind.loader(workers=workers, rank=rank, num_processes=num_processes)

    torch.manual_seed(5)
    whole = list(loader().epoch(epoch))
    positions = range(1, len(whole)) if workers == 0 else [draw.randrange(1, len(whole))]
    for position in positions:
        torch.manual_seed(5)
        done, *kept = trained(loader(), epoch, position)
        assert same(done, whole[:position])
        second = loader()
        again = resumed(second, *kept)
        assert same(again, whole[position:]), f"after batch {position}"


@kinds
@workers
def test_resumed_twice(kind: Kind, workers: int) -> None:
    torch.manual_seed(5)
    whole = list(kind.loader(workers=workers).epoch(1))
    torch.manual_seed(5)
    _, *kept = trained(kind.loader(workers=workers), 1, 3)
    second = kind.loader(workers=workers)
    batches = iter(resumed(second, *kept))
    for _ in range(2):
        second.begin_window()
        next(batches)
    states = second._states.copy()
    third = kind.loader(workers=workers)
    rest = resumed(third, second.cursor(1, 5, batches_per_epoch=1000), second.state(), states)
    assert same(rest, whole[5:])


@kinds
@pytest.mark.parametrize(("workers", "num_processes"), [(0, 1), (0, 2), (2, 1)])
@pytest.mark.parametrize("batch_size", [2, 5])
def test_resumed_with_another_batch_size_each_sample_once(
    kind: Kind, workers: int, num_processes: int, batch_size: int
) -> None:
    parts = []
    for rank in range(num_processes):
        done, *kept = trained(kind.loader(workers=workers, rank=rank, num_processes=num_processes), 1, 3)
        second = kind.loader(batch_size=batch_size, workers=workers, rank=rank, num_processes=num_processes)
        rest = list(resumed(second, *kept))
        parts.append([*done, *rest])
    assert sorted(counted(itertools.chain(*parts))) == [*range(SIZE)]
    assert len({*map(len, parts)}) == 1


@kinds
@pytest.mark.parametrize("others", [(1, 2), (2, 1)])
def test_resumed_with_another_number_of_processes_each_sample_once(kind: Kind, others: tuple[int, int]) -> None:
    before, now = others
    runs = [trained(kind.loader(rank=rank, num_processes=before), 1, 2) for rank in range(before)]
    seen = counted(itertools.chain(*(done for done, *_ in runs)))
    _, *kept = runs[0]
    for rank in range(now):
        seen += counted(resumed(kind.loader(rank=rank, num_processes=now), *kept))
    assert sorted(seen) == [*range(SIZE)]
