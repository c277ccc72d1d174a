"""Processes of one start agree on a prefix; words and answers of starts before it lead nobody astray."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from trainwright.distributed.elastic_store import fresh_prefix
from trainwright.distributed.process_group import init_method
from trainwright.errors import ProcessFailedError

SOON = timedelta(seconds=20)


def start(store: HashStore, order: list[int]) -> list[str]:
    """The prefixes by rank, when processes come one after the other."""

    def come(rank: int) -> str:
        time.sleep(0.05 * order.index(rank))
        return fresh_prefix(store, rank=rank, world_size=len(order), timeout=SOON)

    with ThreadPoolExecutor(len(order)) as pool:
        return list(pool.map(come, range(len(order))))


def test_every_start_has_a_prefix_of_its_own_whoever_comes_first() -> None:
    store = HashStore()
    starts = [start(store, order) for order in ([0, 1, 2], [2, 1, 0], [1, 0], [0, 1, 2, 3])]
    prefixes = [set(prefix) for prefix in starts]
    assert [len(prefix) for prefix in prefixes] == [1] * 4
    assert len(set.union(*prefixes)) == 4


def test_process_that_died_while_it_waited_is_not_taken_for_new_one() -> None:
    store = HashStore()
    store.set("trainwright/word/1", "of the dead")
    main = ThreadPoolExecutor(1).submit(fresh_prefix, store, rank=0, world_size=2, timeout=SOON)
    store.wait(["trainwright/answer/of the dead"])
    assert not main.done()
    assert fresh_prefix(store, rank=1, world_size=2, timeout=SOON) == main.result(timeout=10)


def test_a_single_process_does_not_wait() -> None:
    assert start(HashStore(), [0])


def test_who_does_not_come_is_named() -> None:
    store = HashStore()
    comes = threading.Thread(target=fresh_prefix, args=(store,), kwargs={"rank": 2, "world_size": 4, "timeout": SOON})
    comes.start()
    store.wait(["trainwright/word/2"])
    with pytest.raises(ProcessFailedError, match=r"Process 1, 3 of 4 did not come within 0\.5 s \(ddp_timeout\)"):
        fresh_prefix(store, rank=0, world_size=4, timeout=timedelta(seconds=0.5))
    comes.join()


def test_only_a_launcher_that_keeps_the_store_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert init_method() is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert init_method() is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert init_method() == "trainwright://"
