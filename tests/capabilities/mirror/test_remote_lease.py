"""One live run copies to a URL: who has it, when a claim is stale, and who gets it then, in every kind of store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from trainwright.capabilities.lease.lease import HELD, Holder, take
from trainwright.capabilities.mirror import lease as module
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.errors import ArgumentError, CheckpointWriteError

from ..lease.test_lease import alone, unused_pid

TAKEN: list[RemoteLease] = []


class RemoteLease(module.RemoteLease):
    """A lease that is released after the test, so that none beats on after one that failed."""

    def __init__(self, store: RemoteStore, **kwargs: Any) -> None:
        super().__init__(store, **kwargs)
        TAKEN.append(self)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    before = threading.enumerate()
    yield
    while TAKEN:
        TAKEN.pop().release()
    new = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in new if thread.name == "trainwright-mirror-lease"]


class Aged(RemoteStore):
    """A store that says of the leases of others that they were written so long ago."""

    age_s = 0.0
    moved_s = 0.0  # added at each look: somebody writes it again and again

    def modified(self, name: str) -> float:
        found = super().modified(name)
        if name.startswith(".lease-"):
            self.age_s -= self.moved_s
            return found - self.age_s
        return found


def left_by(store: RemoteStore, number: int = 1, **facts: Any) -> Holder:
    """A lease of another run; by default of another machine."""
    holder = replace(Holder.for_this_process(), **{"host": "elsewhere"} | facts)
    store.overwrite(f".lease-{number}.json", json.dumps(asdict(holder)).encode())
    return holder


def leases(store: RemoteStore) -> list[str]:
    """The leases that were not released, and drafts."""
    names = sorted(name for name in store.names() if name.startswith(".lease"))
    return [name for name in names if store.read(name) != module.RELEASED]


def test_a_claim_is_there_while_it_is_held(store_url: str) -> None:
    store = RemoteStore(store_url)
    lease = RemoteLease(store)
    assert lease.attempt() is None
    assert leases(store) == [".lease-1.json"]
    lease.confirm()
    lease.release()
    assert leases(store) == []
    lease.release()


def test_a_second_run_of_the_process_is_refused(store_url: str) -> None:
    store = RemoteStore(store_url)
    first = RemoteLease(store)
    assert first.attempt() is None
    with pytest.raises(ArgumentError, match=r"checkpoint_mirror=.*in use by.*this process"):
        take(RemoteLease(RemoteStore(store_url)), alone, folder=store_url, wait_s=0.0, argument="checkpoint_mirror")
    first.release()
    second = RemoteLease(store)
    assert second.attempt() is None
    second.release()


def test_a_killed_run_of_this_machine_does_not_block(store_url: str) -> None:
    store = RemoteStore(store_url)
    here = Holder.for_this_process()
    left_by(store, host=here.host, pid=unused_pid())
    lease = RemoteLease(store)
    assert lease.attempt() is None
    assert leases(store) == [".lease-2.json"]
    lease.release()


@pytest.mark.parametrize(("age_s", "is_taken"), [(0.0, False), (60.0, False), (91.0, True)])
def test_a_run_of_another_machine_blocks_until_its_claim_is_old(store_url: str, age_s: float, is_taken: bool) -> None:
    store = Aged(store_url)
    store.age_s = age_s
    left_by(store)
    lease = RemoteLease(store)
    obstacle = lease.attempt()
    assert (obstacle is None) is is_taken
    if obstacle is not None:
        assert not obstacle.is_alive  # not known: so the run waits
        assert "on elsewhere" in obstacle.holder
    lease.release()


def test_a_claim_that_is_written_again_is_that_of_a_live_run(store_url: str) -> None:
    store = Aged(store_url)
    store.age_s = 500.0
    store.moved_s = 15.0
    left_by(store)
    lease = RemoteLease(store)
    lease._seen[1] = 0.0  # as an earlier look saw it
    obstacle = lease.attempt()
    assert obstacle is not None
    assert obstacle.is_alive


def test_of_many_runs_that_find_a_stale_claim_one_gets_it(store_url: str) -> None:
    store = Aged(store_url)
    store.age_s = 500.0
    left_by(store)
    found: list[RemoteLease] = []
    start = threading.Barrier(4)

    def compete() -> None:
        mine = Aged(store_url)
        mine.age_s = 500.0
        lease = RemoteLease(mine)
        start.wait()
        if lease.attempt() is None:
            found.append(lease)

    threads = [threading.Thread(target=compete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    found[0].confirm()
    found[0].release()


class Late(RemoteStore):
    """A store for a run that is suspended before it creates its lease, while others do something."""

    meanwhile: Callable[[], object] | None = None

    def create(self, name: str, content: bytes) -> None:
        meanwhile = self.meanwhile
        self.meanwhile = None
        if meanwhile is not None:
            meanwhile()
        super().create(name, content)


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_a_run_that_looked_long_ago_takes_nothing_from_a_live_one(store_url: str, num_runs: int) -> None:
    """It found a stale lease, which others have taken, released and taken again, until it goes on."""
    here = Holder.for_this_process()
    store = RemoteStore(store_url)
    left_by(store, host=here.host, pid=unused_pid())
    others = [RemoteLease(RemoteStore(store_url)) for _ in range(num_runs)]

    def others_come_and_go() -> None:
        for other in others:
            assert other.attempt() is None
            if other is not others[-1]:
                other.release()

    late = Late(store_url)
    late.meanwhile = others_come_and_go
    assert RemoteLease(late).attempt() is not None
    others[-1].confirm()
    assert leases(store) == [f".lease-{1 + num_runs}.json"]


def test_the_number_of_a_released_lease_is_not_used_again(store_url: str) -> None:
    store = RemoteStore(store_url)
    for number in (1, 2, 3):
        lease = RemoteLease(store)
        assert lease.attempt() is None
        assert [name for name in store.names() if name.startswith(".lease")] == [f".lease-{number}.json"]
        lease.release()


class Ignoring(RemoteStore):
    """A store that ignores the condition."""

    def create(self, name: str, content: bytes) -> None:
        self.overwrite(name, content)


def test_of_many_runs_one_gets_a_url_whose_store_ignores_the_condition(tmp_path: Path) -> None:
    found: list[RemoteLease] = []
    seen = threading.Barrier(4)
    written = threading.Barrier(4)

    class Together(Ignoring):
        has_looked = False

        def create(self, name: str, content: bytes) -> None:
            if not self.has_looked:
                seen.wait(30)
            self.has_looked = True
            super().create(name, content)

    def pause(seconds: float) -> None:
        assert seconds == module.SETTLE_S
        written.wait(30)

    def compete() -> None:
        lease = RemoteLease(Together(f"file://{tmp_path}/run"), pause=pause)
        if lease.attempt() is None:
            found.append(lease)

    threads = [threading.Thread(target=compete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1


def test_a_suspended_run_finds_that_another_has_the_url(store_url: str) -> None:
    store = RemoteStore(store_url)
    suspended = RemoteLease(store)
    assert suspended.attempt() is None
    left_by(store, number=2)  # taken over meanwhile
    store.overwrite(".lease-1.json", module._content(suspended._holder))  # and its own is written once more
    with pytest.raises(CheckpointWriteError, match="on elsewhere"):
        suspended.confirm()
    suspended.release()
    assert ".lease-2.json" in leases(store)


def test_a_deleted_claim_is_taken_again(store_url: str) -> None:
    store = RemoteStore(store_url)
    lease = RemoteLease(store)
    assert lease.attempt() is None
    store.delete([".lease-1.json"])
    lease.confirm()
    assert leases(store) == [".lease-1.json"]
    lease.release()


def test_an_unreadable_claim_is_that_of_an_unknown_process(store_url: str) -> None:
    store = Aged(store_url)
    store.overwrite(".lease-1.json", b"{" * 100)
    obstacle = RemoteLease(store).attempt()
    assert obstacle is not None
    assert obstacle.holder == "an unknown process"


class Unconditional(RemoteStore):
    """A store that knows no condition."""

    def create(self, name: str, content: bytes) -> None:
        raise NotImplementedError("mode='create'")


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_where_a_store_knows_no_condition_the_last_writer_has_it(store_url: str, is_overwritten: bool) -> None:
    store = Unconditional(store_url)
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if is_overwritten:
            left_by(store)

    lease = RemoteLease(store, pause=pause)
    assert (lease.attempt() is None) is not is_overwritten
    assert waits == [module.SETTLE_S]
    lease.release()


def test_the_claim_is_written_again_while_it_is_held(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    store = RemoteStore(store_url)
    written = threading.Event()
    overwrite = store.overwrite

    def noted(name: str, content: bytes) -> None:
        overwrite(name, content)
        written.set()

    store.overwrite = noted  # type: ignore[method-assign]
    lease = RemoteLease(store)
    assert lease.attempt() is None
    assert written.wait(30)
    lease.release()
    assert leases(store) == []


def test_what_killed_run_left_of_a_lease_that_it_wrote_is_removed(tmp_path: Path) -> None:
    store = RemoteStore(tmp_path.as_uri())
    left = tmp_path / "..lease-1.json.77.abcd1234.partial"
    left.write_bytes(b"")
    other = tmp_path / ".lease.token.partial"  # of a run that looks for the time of the store
    other.write_bytes(b"")
    store.clean()
    assert not left.exists()
    assert other.exists()


def test_no_token_stays_held(store_url: str) -> None:
    before = set(HELD)
    lease = RemoteLease(RemoteStore(store_url))
    assert lease.attempt() is None
    lease.release()
    assert before == HELD


def test_a_store_that_is_away_is_no_obstacle_to_the_end(store_url: str) -> None:
    lease = RemoteLease(store := RemoteStore(store_url))
    assert lease.attempt() is None
    answer: Callable[[str], Any] = store.read

    def away(name: str) -> Any:
        raise ConnectionError("away")

    store.read = away  # type: ignore[method-assign]
    lease.release()
    store.read = answer  # type: ignore[method-assign]
    assert leases(store) == [".lease-1.json"]


class Empty(RemoteStore):
    """A store whose listing is always empty: the right to list is missing, and the server does not say so."""

    def names(self) -> list[str]:
        return []


@pytest.mark.parametrize("is_held", [False, True])
def test_a_store_that_lists_nothing_is_an_error_and_no_wait(store_url: str, is_held: bool) -> None:
    if is_held:
        left_by(RemoteStore(store_url))
    waits: list[float] = []
    with pytest.raises(OSError, match=r"does not list \.lease-1\.json.*rights to list"):
        RemoteLease(Empty(store_url), pause=waits.append).attempt()
    assert 0 < sum(waits) < 60


def test_a_listing_that_is_late_is_waited_for(store_url: str) -> None:
    class Late(RemoteStore):
        num_calls = 0

        def names(self) -> list[str]:
            self.num_calls += 1
            return [] if self.num_calls < 4 else super().names()

    store = Late(store_url)
    waits: list[float] = []
    lease = RemoteLease(store, pause=waits.append)
    for _ in range(3):
        if lease.attempt() is None:
            break
    lease.confirm()
    lease.release()


@pytest.mark.parametrize(
    "name", [".lease-" + "9" * 200 + ".json", ".lease-1x.json", ".lease-\u0667.json", ".lease--1.json"]
)
def test_a_planted_name_is_no_lease(store_url: str, name: str) -> None:
    store = RemoteStore(store_url)
    store.overwrite(name, b"{}")
    lease = RemoteLease(store)
    assert lease.attempt() is None
    assert lease.confirm() == 1
    lease.release()


def test_no_run_waits_without_end_for_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.capabilities.lease import lease as leases_module

    class Unknown:
        def attempt(self) -> leases_module.Obstacle:
            return leases_module.Obstacle("an unknown process", is_alive=False)

    monkeypatch.setattr(leases_module, "UNKNOWN_S", 0.02)
    monkeypatch.setattr(leases_module, "POLL_S", 0.01)
    with pytest.raises(ArgumentError, match="in use by an unknown process"):
        take(Unknown(), alone, folder="s3://bucket/run", wait_s=0.0, argument="checkpoint_mirror")  # type: ignore[arg-type]
