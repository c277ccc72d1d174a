"""Laws at world sizes that no test machine has: data, watchdog and collectives of 64, 512 and 4,096 processes.

Where a rank's part is a pure function, all ranks are computed. Where it is not, this process is rank 0 of a group that
sends nothing, and what it asks of the others is counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from trainwright import TrainerCallback
from trainwright.capabilities.mixture.dataset import MixtureDataset
from trainwright.capabilities.mixture.order import mixture_order
from trainwright.capabilities.mixture.plan import MixturePlan
from trainwright.capabilities.packing.plan import RowPlan
from trainwright.capabilities.token_budget.plan import BudgetPlan
from trainwright.config.plans import SamplingPlan
from trainwright.data.batches import EpochBatches
from trainwright.data.order import FeistelOrder, Order, ShuffledOrder
from trainwright.data.sampler_factory import training_order
from trainwright.data.shards import RankShare
from trainwright.distributed import collectives
from trainwright.distributed import watchdog as watching
from trainwright.distributed.process_group import simulated_process_group
from trainwright.distributed.watchdog import Watchdog
from trainwright.engine import distributed_base
from trainwright.preflight.memory.allocation_tracker import CollectiveCounter

from .._support.small import data, make_trainer

pytestmark = pytest.mark.costly

WORLDS = (64, 512, 4096)
BATCH = 2


LOOKED_AT = (0, 1, 7, -2, -1)  # ranks whose batches are read as training reads them


def parts_of(order: Any, num: int, *, first: int = 0, batch_size: int = BATCH) -> list[list[Any]]:
    """The parts of each rank, from a position of the first epoch on; batches that only stand in are left out.

    The arithmetic of a rank's part is applied to every rank. That training reads those parts is looked at for a few.
    """
    indices = [*order.indices_from(0, first)]
    size = num * batch_size
    chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
    found = []
    for rank in range(num):
        share = RankShare(batch_size=batch_size, rank=rank, num_processes=num)
        assert share.num_batches(len(indices), drop_last=False) == len(chunks)
        parts = [(chunk, share.part(len(chunk))) for chunk in chunks]
        found.append([chunk[part.start : part.stop] for chunk, part in parts if part.num_samples])
    for rank in LOOKED_AT:
        share = RankShare(batch_size=batch_size, rank=rank % num, num_processes=num)
        batches = EpochBatches(order, batch_size, share=share)
        batches.seek(0, first)
        mine = list(batches)
        assert len(mine) == len(chunks), "all ranks take equally many steps"
        assert mine[: len(found[rank])] == found[rank]
    return found


def once(parts: list[list[list[int]]]) -> list[int]:
    return sorted(index for mine in parts for batch in mine for index in batch)


ORDERS: dict[str, Any] = {"permutation": ShuffledOrder, "feistel": FeistelOrder}


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("num", WORLDS)
@pytest.mark.parametrize("tail", [0, 1, -1], ids=["whole", "a sample more", "a sample less"])
def test_every_sample_comes_once_in_an_epoch(num: int, kind: str, tail: int) -> None:
    size = 2 * num * BATCH + tail
    order: Order = ORDERS[kind](size, 3)
    assert once(parts_of(order, num)) == [*range(size)]


@pytest.mark.parametrize("before", [8, *WORLDS])
@pytest.mark.parametrize("now", WORLDS)
def test_a_resume_on_another_size_goes_on_where_the_other_stopped(before: int, now: int) -> None:
    """The position is counted in samples: three steps of the one, and the rest of the epoch by the other."""
    size = 4 * max(before, now) * BATCH + 5
    order = ShuffledOrder(size, 3)
    position = 3 * before * BATCH
    trained = [index for mine in parts_of(order, before) for batch in mine[:3] for index in batch]
    assert sorted(trained) == sorted([*order.indices(0)][:position])
    assert sorted(trained + once(parts_of(order, now, first=position))) == [*range(size)]


@pytest.mark.parametrize("num", WORLDS)
def test_shares_of_a_mixture_hold_in_each_step_of_all_ranks(num: int) -> None:
    """In a step of all ranks, each source is within a sample of its share, whatever their number."""
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    dataset = MixtureDataset({name: range(40_000) for name in shares})
    per_step = num * BATCH
    plan = MixturePlan(
        stages=((0, shares),), is_linear=False, unit="samples", samples_per_step=per_step, num_steps=4, num_epochs=1
    )
    order = mixture_order(dataset, plan, seed=1, shuffles=True, lengths=None)
    for step in range(4):
        found = order.at(step * per_step, (step + 1) * per_step)
        counts = np.bincount(np.searchsorted(dataset.offsets[1:], found, side="right"), minlength=3)
        assert np.abs(counts - per_step * np.array([*shares.values()])).max() <= 1.5


FORMED: dict[str, dict[str, Any]] = {
    "token budget": {"batching": BudgetPlan(text="budget", max_tokens=64), "strategy": "random"},
    "packing": {"batching": RowPlan(text="rows", row_length=32), "strategy": "random"},
    "batch_rebalance": {"strategy": "batch_rebalance"},
}


@pytest.mark.parametrize("num", WORLDS)
@pytest.mark.parametrize("name", FORMED)
def test_groups_by_length_are_shared_once_and_keep_their_budget(name: str, num: int) -> None:
    lengths = [3 + i * 7 % 14 for i in range(4 * num * BATCH)]
    items = [{"input_ids": [1] * length} for length in lengths]
    plan = SamplingPlan(batch_size=BATCH, micro_batches=1, num_processes=num, seed=1, **FORMED[name])
    order: Any = training_order(items, plan)
    groups = [group for mine in parts_of(order.for_all_processes(), num, batch_size=1) for (group,) in mine]
    if name == "packing":
        seen = Counter(piece[0] if isinstance(piece, tuple) else piece for group in groups for piece in flat(group))
    else:
        seen = Counter(index for group in groups for index in group)
    assert seen == Counter(range(len(items)))
    if name == "token budget":
        assert max(len(group) * max(lengths[index] for index in group) for group in groups) <= 64


def flat(group: Any) -> list[Any]:
    found: list[Any] = []
    for piece in group:
        found += flat(piece) if isinstance(piece, list) else [piece]
    return found


# -- the store -----------------------------------------------------------------------------------------------------


class CountingStore:
    """A store that counts the requests that it gets; several watchdogs of one process share it."""

    def __init__(self) -> None:
        self._store = HashStore()
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            with self._lock:
                self.requests[name] += 1
            return call(*args)

        return counted


class Idle(Watchdog):
    """A watchdog whose thread does nothing: the test takes its turns."""

    def _run(self) -> None: ...

    def turn(self) -> None:
        self._check_progress()
        self._check_store(self._store)  # type: ignore[arg-type]


def members(num: int, store: Any) -> list[Idle]:
    return [Idle(store, rank=rank, num_processes=num, hang_timeout_s=0.0) for rank in range(num)]


@pytest.mark.parametrize("num", WORLDS)
def test_the_store_gets_no_more_requests_a_second_than_it_can_answer(num: int) -> None:
    store = CountingStore()
    ranks = members(num, store)
    for rank in ranks:
        rank.turn()
    turns_per_s = 1 / ranks[0]._poll_s
    assert store.requests.total() * turns_per_s <= watching.MAX_REQUESTS_PER_S
    assert ranks[0]._poll_s <= 2.1, "a signal is noticed within seconds, also among thousands"


@pytest.mark.parametrize("num", WORLDS)
def test_signal_ends_all_ranks_at_one_step_with_handful_of_requests_each(num: int) -> None:
    """Not with a request of each rank to each other: only rank 0 reads where the others are."""
    store = CountingStore()
    ranks = members(num, store)
    for number, rank in enumerate(ranks):
        for _ in range(number % 7):
            rank.passes()
    ranks[num // 2].ask(15)
    for _ in range(3):  # the signal is published; the ranks name their steps; rank 0 names the last of them
        for rank in ranks:
            rank.turn()
    ends = set()
    for number, rank in enumerate(ranks):
        passed = number % 7
        while True:
            passed += 1
            signal = rank.passes()
            if signal is not None:
                break
        ends.add((passed, signal))
    assert ends == {(7, 15)}
    assert store.requests.total() <= 25 * num


# -- collectives -----------------------------------------------------------------------------------------------------

STEPS = 9
LOG = 3
SAVE = 5
EVALUATE = 7
Counts = dict[str, tuple[int, int]]  # calls and bytes of each collective


class Phases(TrainerCallback):
    """Notes what was asked of the others in each step, and between two steps, where logs, saves and evaluations are."""

    def __init__(self, counter: CollectiveCounter) -> None:
        self._counter = counter
        self._before: Counts = {}
        self.found: dict[str, Counts] = {}

    def _note(self, phase: str) -> None:
        now = {one.name: (one.calls, one.bytes) for one in self._counter.found()}
        more = {name: tuple(np.subtract(count, self._before.get(name, (0, 0)))) for name, count in now.items()}
        self.found[phase] = {name: (int(calls), int(size)) for name, (calls, size) in more.items() if calls}
        self._before = now

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(f"after {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(f"step {state.global_step}")


class Answered(torch.nn.parallel.DistributedDataParallel):
    """Torch's wrapper in a group that sends nothing: it sums its buckets by itself, as its default does in C++."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        self.register_comm_hook(None, lambda state, bucket: summed(bucket.buffer()))


def summed(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(buffer)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, accumulated": {"gradient_accumulation_steps": 2},
    "fsdp2": {"fsdp": True},
    "hsdp": {"fsdp": "hybrid_shard"},
}


def phases_of(num: int, settings: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Counts]:
    """Trains as rank 0 of so many, with a log, a save and an evaluation, each after a step of its own."""
    monkeypatch.setattr(collectives, "cpu_group", lambda purpose: dist.new_group(backend="fake"))
    monkeypatch.setattr(distributed_base, "DistributedDataParallel", Answered)
    rhythm = {"max_steps": STEPS, "logging_steps": LOG, "save_steps": SAVE, "eval_strategy": "steps"}
    rhythm |= {"eval_steps": EVALUATE, "per_device_train_batch_size": 1, "preflight": False, "save_async": False}
    with simulated_process_group(rank=0, num_processes=num, per_node=8):
        counter = CollectiveCounter()
        phases = Phases(counter)
        items = data.vectors(8)
        trainer = make_trainer(
            folder,
            train_dataset=items * (num * STEPS * 2 // 8),
            eval_dataset=items,
            callbacks=[phases],
            **rhythm,
            **settings,
        )
        with counter:
            trainer.train()
    return phases.found


def calls(counts: Counts) -> dict[str, int]:
    return {name: number for name, (number, _) in counts.items()}


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")  # accelerate's use of torch, for hybrid sharding
@pytest.mark.parametrize("name", ENGINES)
def test_what_rank_asks_of_the_others_does_not_grow_with_their_number(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has the same calls of the same size. A log, a save and an evaluation have the same calls."""
    found = {num: phases_of(num, ENGINES[name], tmp_path / str(num), monkeypatch) for num in (64, 512)}
    few, many = found.values()
    assert few.keys() == many.keys()
    for phase in few:
        assert calls(few[phase]) == calls(many[phase]), phase
    plain = few["step 2"]
    assert plain
    for step in set(range(2, STEPS + 1)) - {EVALUATE + 1}:  # an evaluation may leave parameters gathered for the next
        assert few[f"step {step}"] == plain, f"step {step} asks for something else than step 2"
    quiet = few["after 1"]
    for step in set(range(1, STEPS)) - {LOG, 2 * LOG, SAVE, EVALUATE}:
        assert few[f"after {step}"] == quiet, "nothing else is asked between steps"
    assert sum(calls(few[f"after {LOG}"]).values()) <= 3
    if name.startswith("ddp"):
        assert few["step 2"] == many["step 2"], "nor do the messages grow"
    for num, phases in found.items():
        for at in (LOG, EVALUATE) if name.startswith("ddp") else (LOG,):  # counts and times of each rank
            assert phases[f"after {at}"].get("all_gather", (0, 0))[1] <= 128 * num
