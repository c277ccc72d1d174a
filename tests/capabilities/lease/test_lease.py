"""One live run saves into a directory: who holds it, when a lease is stale, and what waits, without a training."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainwright.capabilities.lease import lease as leases
from trainwright.capabilities.lease.lease import Holder, Lease, take
from trainwright.errors import ArgumentError, CheckpointWriteError

LONG_AGO = 1000.0


def alone(decide: Callable[[], bool]) -> bool:
    return decide()


def left_by(folder: Path, *, number: int = 1, age_s: float = 0.0, **facts: Any) -> Path:
    """A lease file of another run; by default of this very process, which does not hold it."""
    folder.mkdir(exist_ok=True)
    path = folder / f".lease-{number}.json"
    path.write_text(json.dumps(asdict(replace(Holder.for_this_process(), **facts))))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def unused_pid() -> int:
    return next(pid for pid in range(2**22 - 1, 1, -1) if not psutil.pid_exists(pid))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_lease_is_a_file_while_it_is_held(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "run")
    assert lease.attempt() is None
    assert names(tmp_path / "run") == [".lease-1.json"]
    held = json.loads((tmp_path / "run" / ".lease-1.json").read_text())
    assert held["pid"] == os.getpid()
    assert held["began"] == psutil.Process().create_time()
    assert [thread.name for thread in threading.enumerate()].count("trainwright-lease") == 1
    lease.release()
    assert names(tmp_path / "run") == []


def test_second_one_of_this_process_is_refused_until_the_first_is_released(tmp_path: Path) -> None:
    first = Lease(tmp_path)
    second = Lease(tmp_path)
    assert first.attempt() is None
    with pytest.raises(ArgumentError, match=rf"is in use by process {os.getpid()} on .*this process, since .*another"):
        take(second, alone, folder="out", wait_s=0)
    assert names(tmp_path) == [".lease-1.json"]
    first.release()
    assert second.attempt() is None
    second.release()


def test_it_waits_for_as_long_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "POLL_S", 0.01)
    first = Lease(tmp_path)
    second = Lease(tmp_path)
    assert first.attempt() is None
    with pytest.raises(ArgumentError, match="in use"):
        take(second, alone, folder="out", wait_s=0.05)
    attempts: list[bool] = []

    def agree(decide: Callable[[], bool]) -> bool:
        attempts.append(decide())
        if len(attempts) == 3:
            first.release()
        return attempts[-1]

    take(second, agree, folder="out", wait_s=60)
    assert attempts == [False, False, False, True]
    second.release()


DEAD = {
    "the process is gone": lambda: {"pid": unused_pid()},
    "this process, whose trainer did not release it": dict,
    "another start of that number, long ago": lambda: {"pid": os.getppid(), "began": 5.0, "age_s": LONG_AGO},
    "another machine, long ago": lambda: {"host": "elsewhere", "age_s": LONG_AGO},
    "pid 1 of a container of the same name, long ago": lambda: {"place": "x", "pid": 1, "age_s": LONG_AGO},
}


@pytest.mark.parametrize("facts", DEAD.values(), ids=DEAD.keys())
def test_a_stale_lease_is_taken_over_with_a_line_in_the_log(
    facts: Callable[[], dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left_by(tmp_path, number=3, **facts())
    lease = Lease(tmp_path)
    assert lease.attempt() is None
    assert names(tmp_path) == [".lease-4.json"]
    assert "ended without releasing" in caplog.text
    assert "process" not in caplog.text, "its number may be another's by now"
    lease.release()


@pytest.mark.process
def test_a_zombie_is_dead(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    began = psutil.Process(child).create_time()
    while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)
    left_by(tmp_path, pid=child, began=began)
    lease = Lease(tmp_path)
    assert lease.attempt() is None
    lease.release()
    os.waitpid(child, 0)


def test_a_live_process_of_this_machine_holds_it_however_old_its_file(tmp_path: Path) -> None:
    parent = psutil.Process(os.getppid())
    left_by(tmp_path, pid=parent.pid, began=parent.create_time(), age_s=LONG_AGO)
    obstacle = Lease(tmp_path).attempt()
    assert obstacle is not None
    assert obstacle.is_alive
    assert names(tmp_path) == [".lease-1.json"]


def test_on_another_machine_it_lives_as_soon_as_its_file_is_touched(tmp_path: Path) -> None:
    path = left_by(tmp_path, host="elsewhere", age_s=2)
    lease = Lease(tmp_path)
    first = lease.attempt()
    second = lease.attempt()
    assert first is not None
    assert second is not None
    assert not first.is_alive
    assert not second.is_alive
    os.utime(path)
    third = lease.attempt()
    assert third is not None
    assert third.is_alive
    assert "on elsewhere" in third.holder


def test_on_another_machine_an_untouched_file_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the time of the file says: that may lie in the future."""
    left_by(tmp_path, host="elsewhere", age_s=-LONG_AGO)
    lease = Lease(tmp_path)
    assert lease.attempt() is not None
    monkeypatch.setattr(leases, "STALE_S", 0.0)
    assert lease.attempt() is None
    lease.release()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": 1}', '{"host": 1, "place": 2, "pid": "x", "began": 1, "since": 1}']
)
def test_a_file_that_is_not_a_lease_counts_by_its_time(text: str, tmp_path: Path) -> None:
    path = tmp_path / ".lease-1.json"
    path.write_text(text)
    assert Lease(tmp_path).attempt() is not None
    os.utime(path, (time.time() - LONG_AGO,) * 2)
    lease = Lease(tmp_path)
    assert lease.attempt() is None
    lease.release()


IMPOSSIBLE: dict[str, Any] = {
    "since is not a number": {"since": float("nan")},
    "since is infinite": {"since": float("inf")},
    "since is before 1970": {"since": -1e300},
    "since is after the year 9999": {"since": 1e18},
    "since is text": {"since": "today"},
    "began is not a number": {"began": float("nan")},
    "pid is huge": {"pid": 10**30},
    "pid is negative": {"pid": -1},
    "token is a list": {"token": []},
    "host is long": {"host": "h" * 60_000},
}


@pytest.mark.parametrize("facts", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_values_that_no_run_writes_are_those_of_an_unknown_process(facts: dict[str, Any], tmp_path: Path) -> None:
    path = left_by(tmp_path, age_s=LONG_AGO, **facts)
    assert Holder.read(path) is None
    os.utime(path)
    obstacle = Lease(tmp_path).attempt()
    assert obstacle is not None
    assert obstacle.holder == "an unknown process"


def test_a_lease_since_a_time_to_come_is_read_as_it_is(tmp_path: Path) -> None:
    parent = psutil.Process(os.getppid())
    left_by(tmp_path, pid=parent.pid, began=parent.create_time(), since=time.time() + 1e9)
    with pytest.raises(ArgumentError, match=rf"in use by process {parent.pid} on .*, since 20\d\d-"):
        take(Lease(tmp_path), alone, folder="out", wait_s=0)


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def as_directory(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


def as_link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("name", [".lease-4.json", ".lease.0123.partial"])
@pytest.mark.parametrize("make", [as_pipe, as_endless_device, as_directory, as_link_to_nothing])
def test_a_lease_that_is_not_a_regular_file_is_ignored(
    make: Callable[[Path], None], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and left where it is; a run neither waits for it nor writes through it."""
    make(tmp_path / name)
    lease = Lease(tmp_path)
    assert lease.attempt() is None
    lease.confirm()
    second = Lease(tmp_path).attempt()
    assert second is not None
    assert second.is_alive
    is_lease = name.endswith(".json")
    assert names(tmp_path) == sorted([".lease-5.json" if is_lease else ".lease-1.json", name])
    assert ("is not a lease of a run: it is not a regular file" in caplog.text) is is_lease
    assert "cannot be claimed" not in caplog.text
    lease.release()


def test_of_many_that_find_a_stale_lease_one_takes_it(tmp_path: Path) -> None:
    left_by(tmp_path, pid=unused_pid())
    many = [Lease(tmp_path) for _ in range(8)]
    start = threading.Barrier(len(many))
    results = [object()] * len(many)

    def run(index: int) -> None:
        start.wait()
        results[index] = many[index].attempt()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(many))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(None) == 1
    assert len(names(tmp_path)) == 1
    for lease in many:
        lease.release()


def test_a_disk_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    first = Lease(tmp_path)
    second = Lease(tmp_path)
    assert first.attempt() is None
    assert second.attempt() is not None
    first.release()
    assert names(tmp_path) == []


def test_where_nothing_can_be_written_the_run_has_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    lease = Lease(tmp_path)
    assert lease.attempt() is None
    assert "another run in it will not be noticed" in caplog.text
    lease.confirm()
    lease.release()
    assert names(tmp_path) == []


def test_the_thread_touches_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = threading.Event()
    monkeypatch.setattr(leases, "BEAT_S", 0.001)
    monkeypatch.setattr(os, "utime", lambda path: touched.set())
    lease = Lease(tmp_path)
    assert lease.attempt() is None
    assert touched.wait(10)
    lease.release()


def test_a_lease_that_was_taken_over_is_noticed_before_a_save(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    assert lease.attempt() is None
    lease.confirm()
    (tmp_path / ".lease-1.json").unlink()
    lease.confirm()  # deleted by hand: it is taken again
    assert names(tmp_path) == [".lease-1.json"]
    (tmp_path / ".lease-1.json").unlink()
    left_by(tmp_path, number=2, host="elsewhere")
    with pytest.raises(CheckpointWriteError, match=r"belongs to process .* on elsewhere, .*was not seen alive"):
        lease.confirm()
    lease.release()
    assert names(tmp_path) == [".lease-2.json"]


def test_a_run_without_a_lease_takes_it_before_its_first_save(tmp_path: Path) -> None:
    first = Lease(tmp_path)
    second = Lease(tmp_path)
    first.confirm()
    with pytest.raises(CheckpointWriteError, match=rf"belongs to process {os.getpid()}"):
        second.confirm()
    first.release()
    left_by(tmp_path, host="elsewhere")
    second.confirm()  # nothing shows that this one lives, and the save is not lost for it


def test_a_draft_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".lease.0123.partial"
    dead = replace(Holder.for_this_process(), pid=2**22 + 1)
    left.write_text(json.dumps(asdict(dead)))
    lease = Lease(tmp_path)
    assert lease.attempt() is None
    assert not left.exists()
    lease.release()
