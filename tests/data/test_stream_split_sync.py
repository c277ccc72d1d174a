"""A stream that `split_dataset_by_node` has split: each process reads its part, and all take the same steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import default_collate

from trainwright._types import TailBatch
from trainwright.checkpoint import rng
from trainwright.config.plans import LoaderPlan
from trainwright.data.cursor import Cursor, LoaderState, check_same_data
from trainwright.data.dataloader import build_dataloader
from trainwright.data.loader import Loader
from trainwright.errors import DataError

from .._support.small import data, make_trainer, module, weights
from .._support.two_processes import run
from ..laws.loaders import BUDGET, ROWS, ids, item

SIZE = 37


class Table:
    """Threads stand in for processes: each says its word, and hears those of all."""

    def __init__(self, num: int) -> None:
        self.words: list[Any] = [None] * num
        self.barrier = threading.Barrier(num, timeout=60)
        self.num_rounds = 0

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)


class Seat:
    def __init__(self, table: Table, rank: int) -> None:
        self.table = table
        self.rank = rank

    def gather_objects(self, value: Any) -> list[Any]:
        self.table.words[self.rank] = value
        self.table.barrier.wait()
        words = list(self.table.words)
        self.table.barrier.wait()
        return words

    def gather_counts(self, count: int) -> list[int]:
        return self.gather_objects(count)


def stream(num_shards: int, size: int = SIZE) -> Any:
    return datasets.Dataset.from_list([item(i) for i in range(size)]).to_iterable_dataset(num_shards=num_shards)


def uneven(num_shards: int) -> Any:
    """A shard of the stream has as much as all others together."""

    def items(shards: list[int]) -> Iterable[dict[str, Any]]:
        for shard in shards:
            yield from (item(i) for i in (range(19) if shard == 0 else range(18 + shard, SIZE, num_shards - 1)))

    return datasets.IterableDataset.from_generator(items, gen_kwargs={"shards": [*range(num_shards)]})


KINDS: dict[str, tuple[Callable[[], Any], Any]] = {
    "shards of equal size": (lambda: stream(4), None),
    "shards that cannot be shared out": (lambda: stream(3), None),
    "a long shard": (lambda: uneven(4), None),
    "shuffled": (lambda: stream(4).shuffle(seed=5, buffer_size=7), None),
    "in budgets": (lambda: uneven(4), BUDGET),
    "packed": (lambda: stream(3), ROWS),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def loader(kind: str, seat: Seat, *, workers: int = 0, batch_size: int = 3, parts: int = 2) -> Loader:
    make, former = KINDS[kind]
    part = split_dataset_by_node(make(), rank=seat.rank, world_size=parts)
    plan = LoaderPlan(
        batch_size=batch_size, seed=7, workers=workers, rank=seat.rank, num_processes=parts, is_training=True
    )
    dataloader = build_dataloader(part, plan, sampler=former, collate=ids, exchange=seat)
    return Loader(dataloader, random_state=rng.capture, set_random_state=lambda states: None)  # threads share them


def together(task: Callable[[Seat], Any], parts: int = 2) -> list[Any]:
    """What each process gets out of a task."""
    table = Table(parts)
    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(task, [table.seat(rank) for rank in range(parts)]))


def shown(batch: Any) -> tuple[list[int], float | None]:
    return ([], 0.0) if is_stand_in(batch) else (batch["id"], getattr(batch, "weight", None))


def is_stand_in(batch: Any) -> bool:
    return isinstance(batch, TailBatch) and batch.num_samples == 0


@kinds
@pytest.mark.parametrize("workers", [0, 2])
def test_every_item_once_in_as_many_steps_on_each_process(kind: str, workers: int) -> None:
    def task(seat: Seat) -> list[Any]:
        return [shown(batch) for batch in loader(kind, seat, workers=workers).epoch(1)]

    one, other = together(task)
    assert len(one) == len(other)
    assert sorted(i for ids, _ in one + other for i in ids) == [*range(SIZE)]


@kinds
def test_a_batch_weighs_what_is_in_it(kind: str) -> None:
    """The mean over the processes of weighted means is the mean over the samples (or batches) of all."""
    for pair in zip(*together(lambda seat: [shown(b) for b in loader(kind, seat).epoch(0)]), strict=True):
        unit = [int(bool(ids)) if KINDS[kind][1] else len(ids) for ids, _ in pair]
        full = all(size == (1 if KINDS[kind][1] else 3) for size in unit)
        assert [weight for _, weight in pair] == [None if full else 2 * size / sum(unit) for size in unit]


@pytest.mark.costly
@kinds
def test_stopped_anywhere_each_goes_on_from_its_own_place(kind: str) -> None:
    def whole(seat: Seat) -> list[Any]:
        return [shown(batch) for batch in loader(kind, seat).epoch(1)]

    expected = together(whole)

    def stopped(seat: Seat) -> list[tuple[list[Any], Cursor, LoaderState]]:
        kept = []
        for position in range(1, len(expected[0])):
            first = loader(kind, seat)
            batches = first.epoch(1)
            done = [shown(next(batches)) for _ in range(position)]
            kept.append((done, first.cursor(1, position, batches_per_epoch=1000), first.state()))
        return kept

    stops = together(stopped)

    def resumed(seat: Seat) -> list[list[Any]]:
        runs = []
        for (done, _, randomness), (_, cursor, _) in zip(stops[seat.rank], stops[0], strict=True):
            second = loader(kind, seat)
            epoch, batches = second.resume(Cursor.from_dict(cursor.to_dict()), randomness)  # the main process's cursor
            assert batches == len(done)
            rest = second.epoch(epoch, skip_batches=batches, after_first=lambda: None)
            runs.append([*done, *map(shown, rest)])
        return runs

    for rank, runs in enumerate(together(resumed)):
        for position, run_of in enumerate(runs, start=1):
            assert run_of == expected[rank], f"process {rank} after batch {position}"


def test_with_another_batch_size_the_rest_is_trained_once() -> None:
    kind = "a long shard"

    def task(seat: Seat) -> list[Any]:
        first = loader(kind, seat)
        batches = first.epoch(0)
        done = [next(batches) for _ in range(2)]
        second = loader(kind, seat, batch_size=5)
        epoch, skipped = second.resume(first.cursor(0, 2, batches_per_epoch=1000), first.state())
        rest = list(second.epoch(epoch, skip_batches=skipped, after_first=lambda: None))
        return [shown(batch) for batch in [*done, *rest]]

    one, other = together(task)
    assert len(one) == len(other)
    assert sorted(i for ids, _ in one + other for i in ids) == [*range(SIZE)]


def test_a_part_without_samples_is_an_error_on_all() -> None:
    def task(seat: Seat) -> str:
        part = split_dataset_by_node(stream(1, size=2), rank=seat.rank, world_size=3)
        plan = LoaderPlan(batch_size=2, seed=7, rank=seat.rank, num_processes=3, is_training=True)
        dataloader = build_dataloader(part, plan, sampler=None, collate=default_collate, exchange=seat)
        with pytest.raises(DataError) as error:
            list(dataloader)
        return str(error.value)

    assert all("of process 2 has no sample" in message for message in together(task, 3))


def test_a_split_for_others_is_refused() -> None:
    plan = LoaderPlan(batch_size=2, seed=7, rank=1, num_processes=2, is_training=True)
    for rank, parts in ((0, 2), (1, 3)):
        part = split_dataset_by_node(stream(6), rank=rank, world_size=parts)
        with pytest.raises(DataError, match=rf"rank={rank}, world_size={parts}.*this is process 1 of 2"):
            build_dataloader(part, plan, sampler=None, collate=ids, exchange=Table(2).seat(1))


def test_a_resume_that_would_lose_a_place_is_refused() -> None:
    def task(seat: Seat) -> tuple[Cursor, LoaderState]:
        first = loader("a long shard", seat)
        next(first.epoch(0))
        return first.cursor(0, 1, batches_per_epoch=1000), first.state()

    (cursor, of_main), _ = together(task)
    second = loader("a long shard", Table(2).seat(1))
    with pytest.raises(DataError, match="does not record the position of process 1"):
        second.resume(cursor, of_main)
    with pytest.raises(DataError, match="does not record the position of process 1"):
        second.resume(cursor, LoaderState())
    with pytest.raises(DataError, match=r"of 2 parts read by a process each, but this run has single samples"):
        check_same_data(cursor, None, None)


def trainer_of(name: Path | str, *, rank: int | None = None, **settings: Any) -> Any:
    """On a process's part of a stream of 22 rows, or on all of it."""
    rows = [{"x": row["x"].tolist(), "labels": row["labels"]} for row in data.vectors(22)]
    whole: Any = datasets.Dataset.from_list(rows).with_format("torch").to_iterable_dataset(num_shards=3)
    part = whole if rank is None else split_dataset_by_node(whole, rank=rank, world_size=2)
    return make_trainer(name, model=module(dropout=0.0), train_dataset=part, lr_scheduler_type="constant", **settings)


@pytest.mark.process
@pytest.mark.timeout(200)
def test_two_processes_are_one_with_their_batches_together_also_when_they_resume(tmp_path: Path) -> None:
    done = run(
        """
        import os
        from tests._support.small import StopAt, weights
        from tests._support.two_processes import tell
        from tests.data.test_stream_split_sync import trainer_of

        RANK = int(os.environ["RANK"])
        through = trainer_of("through", rank=RANK)
        through.train()
        trainer_of("twice", rank=RANK, callbacks=[StopAt(5)]).train()
        again = trainer_of("twice", rank=RANK)
        again.train(resume_from_checkpoint=True)
        tell(steps=through.state.global_step, epoch=through.state.epoch, files=os.listdir("twice/checkpoint-5"),
             through=[p.tolist() for p in weights(through.model).values()],
             again=[p.tolist() for p in weights(again.model).values()])
        """,
        folder=tmp_path,
    )
    one, other = done.told
    assert one["through"] == other["through"] == one["again"] == other["again"]
    assert {"data_position_0.pth", "data_position_1.pth"} <= set(one["files"])
    assert (one["steps"], one["epoch"]) == (6, 2.0)  # parts of 11: batches of 4, 4 and 3
    alone = trainer_of(tmp_path / "alone", per_device_train_batch_size=8)
    alone.train()
    for ours, theirs in zip(one["through"], weights(alone.model).values(), strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-4, atol=1e-6)
