"""The watchdog: all processes stop at one place, whoever was signalled and however far each of them is."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest
from torch.distributed import HashStore, distributed_c10d

from trainwright.distributed import watchdog as watching
from trainwright.distributed.process_group import simulated_process_group
from trainwright.distributed.watchdog import Watchdog, start_watchdog

PLACES = 100_000


def watches(count: int) -> list[Watchdog]:
    store = HashStore()
    return [Watchdog(store, rank=rank, num_processes=count, hang_timeout_s=0.0) for rank in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_all_stop_at_the_same_place(seed: int) -> None:
    """Nothing holds them together here, as in an evaluation without collectives: each runs at a speed of its own."""
    draw = random.Random(seed)
    members = watches(4)
    stops: dict[int, tuple[int, int | None]] = {}
    signalled = draw.randrange(4)
    when = draw.uniform(0.0, 0.4)

    def work(rank: int, pause: float) -> None:
        for place in range(1, PLACES):
            number = members[rank].passes()
            if number is not None:
                stops[rank] = place, number
                return
            time.sleep(pause)

    threads = [threading.Thread(target=work, args=(rank, draw.uniform(0.0005, 0.02))) for rank in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(when)
    members[signalled].ask(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    for member in members:
        member.close()
    assert len(stops) == 4
    assert len(set(stops.values())) == 1
    assert stops[0][1] == signal.SIGTERM


def test_two_signals_count_as_one() -> None:
    first, second = watches(2)
    first.ask(signal.SIGTERM), second.ask(signal.SIGUSR1)
    numbers: list[set[int | None]] = []
    for member in (first, second):
        seen: set[int | None] = set()
        while not seen - {None}:
            seen.add(member.passes())
            time.sleep(0.01)
        numbers.append(seen - {None})
        member.close()
    assert numbers[0] == numbers[1]


def test_only_the_first_failure_is_the_first() -> None:
    one, other = watches(2)
    assert one.fails(ValueError("broken sample")) is None
    first = other.fails(RuntimeError("connection closed by peer"))
    assert first is not None
    assert "Process 0 failed" in first
    assert "ValueError: broken sample" in first
    one.close(), other.close()


def test_a_process_that_cannot_leave_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watching, "GRACE_S", 0.3)
    codes: list[int] = []
    monkeypatch.setattr(watching.os, "_exit", codes.append)
    one, other = watches(2)
    one.fails(ValueError("broken sample"))
    deadline = time.monotonic() + 20
    while not codes and time.monotonic() < deadline:
        time.sleep(0.05)
    one.close(), other.close()
    assert set(codes) == {1}
    assert "ValueError: broken sample" in capfd.readouterr().err


def can_be_cloned() -> bool:
    try:
        distributed_c10d._get_default_store().clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def test_a_store_that_cannot_be_cloned_leaves_a_watch_of_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watching._warn_missing_store.cache_clear()
    with simulated_process_group(rank=0, num_processes=4, per_node=4):  # whose store has no values
        if can_be_cloned():
            pytest.skip("this version of torch clones the store of a group that sends nothing")
        assert start_watchdog(hang_timeout_s=0.0, run=0) is None, "there is nothing left to watch for"
        alone = start_watchdog(hang_timeout_s=60.0, run=1)
        assert alone is not None
        assert not alone.is_shared
        alone.close()
    [said] = [record.message for record in caplog.records if "cannot be cloned" in record.message]
    assert "as torchrun does" in said
