"""Copies of checkpoints under a URL: which are sent, and what happens while the store fails. Time is the test's own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainwright.capabilities.mirror import clock as module_of_pace
from trainwright.capabilities.mirror import mirror as module
from trainwright.capabilities.mirror import remote as remote_module
from trainwright.capabilities.mirror.clock import Pace
from trainwright.capabilities.mirror.mirror import Mirror
from trainwright.capabilities.mirror.plan import MirrorPlan
from trainwright.capabilities.mirror.remote import Copy, RemoteStore
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.errors import CheckpointWriteError

REAL_S = 30.0  # for a thread to do what it is about to do


class TestClock:
    """Seconds pass when the test says so."""

    __test__ = False

    def __init__(self) -> None:
        self._now = 0.0
        self._changed = threading.Condition()
        # Thread that waits -> the time that it has seen.
        self._seen: dict[int, float] = {}

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        with self._changed:
            self._now += seconds
            self._changed.notify_all()

    def wait(self, event: threading.Event, seconds: float | None) -> None:
        thread = threading.get_ident()
        with self._changed:
            until = None if seconds is None else self._now + seconds
            while not event.is_set() and (until is None or self._now < until):
                self._seen[thread] = self._now
                self._changed.wait(0.01)
            self._seen.pop(thread, None)

    def is_waited_for(self) -> bool:
        """Returns True if a thread waits although it knows how late it is."""
        with self._changed:
            return self._now in self._seen.values()


class Faults:
    """What a store raises from now on, whether it answers, and what it was asked."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.hangs_at: str | None = None  # the only call that hangs; None: each one
        self.is_hanging = threading.Event()
        self.calls: list[str] = []


class Client:
    """A client of a store with faults."""

    def __init__(self, client: Any, faults: Faults) -> None:
        self._client = client
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name not in ("pipe_file", "cat_file", "ls", "info", "find", "open", "rm_file", "rm"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._faults.calls.append(f"{name} {args[0] if args else ''}")
            if self._faults.hangs_at in (None, name):
                if not self._faults.answers.is_set():
                    self._faults.is_hanging.set()
                assert self._faults.answers.wait(REAL_S)
            if self._faults.error is not None:
                raise self._faults.error
            return found(*args, **kwargs)

        return call


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    found = Faults()
    connect = remote_module._open

    def with_faults(url: str) -> tuple[Any, str]:
        client, root = connect(url)
        return Client(client, found), root

    monkeypatch.setattr(remote_module, "_open", with_faults)
    return found


class Claim:
    """A claim that another run may have taken."""

    is_lost = False
    number = 3

    def confirm(self) -> int:
        if self.is_lost:
            raise CheckpointWriteError("the URL belongs to process 7 on elsewhere")
        return self.number


class Bench:
    """A run's directory, its mirror, and the store that gets the copies."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self.folder = folder / "run"
        self.url = (folder / "store").as_uri()
        self.clock = TestClock()
        self.claim = Claim()
        self.told: list[dict[str, Any]] = []
        self.plan = MirrorPlan(url=self.url, **plan)
        self.mirror = self.new_mirror()

    def new_mirror(self) -> Mirror:
        pace = Pace(self.plan.bytes_per_s, self.clock)
        store = RemoteStore(self.url, pace=pace)
        tell = self.told.append
        mirror = Mirror(self.folder, store, self.plan, self.claim, tell=lambda **v: tell(v), clock=self.clock)
        pace.sign = mirror.signs.give
        return mirror

    def begin(self, *, continues: bool = False) -> None:
        self.mirror.begin([], continues=continues)

    def save(self, step: int, *, best: int | None = None, written_at: float = 0.0, content: str = "weights") -> Path:
        """Writes a checkpoint, as the store commits it, and tells the mirror.

        The files of one that has this step already are not written in place: the mirror has links to them.
        """
        path = self.folder / f"checkpoint-{step}"
        new = self.folder / f"tmp-{step}"
        new.mkdir(parents=True)
        (new / "model.safetensors").write_text(f"{content} {step}")
        state = {"global_step": step, "best_global_step": best}
        (new / "trainer_state.json").write_text(json.dumps(state))
        Manifest(step=step, run_id="run", files=describe_files(new), written_at=written_at).write(new)
        shutil.rmtree(path, ignore_errors=True)
        new.rename(path)
        self.mirror.committed(path)
        return path

    def end(self) -> None:
        """The end of the run, in which seconds pass."""
        ending = threading.Thread(target=self.mirror.end)
        ending.start()
        while ending.is_alive():
            self.clock.advance(1)
            time.sleep(0.005)

    def steps(self) -> list[int]:
        """The steps of the copies that are whole."""
        store = RemoteStore(self.url)
        found = store.manifests()
        assert [list(store.problems(one)) for one in found] == [[] for _ in found]
        return sorted(one.step for one in found)

    def waiting(self) -> set[str]:
        return {path.name for path in self.mirror.outbox.path.glob("checkpoint-*")}

    def until_sent(self, step: int) -> None:
        until(lambda: any(one.get("step") == step for one in self.told))

    def until_copies_are(self, *names: str) -> None:
        """Waits while time passes, as `until_sent_again` does."""
        store = RemoteStore(self.url)
        until(lambda: (self.clock.advance(1), [copy.name for copy in store.copies()] == [*names])[1])

    def until_sent_again(self, step: int) -> None:
        """As `until_sent`, while time passes: the thread may begin its pause after the test has gone on."""
        until(lambda: (self.clock.advance(1), any(one.get("step") == step for one in self.told))[1])


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + REAL_S
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def bench(tmp_path: Path, faults: Faults) -> Iterator[Bench]:
    made = Bench(tmp_path)
    made.begin()
    yield made
    made.end()


def test_what_is_saved_is_copied_and_nothing_is_left_waiting(bench: Bench) -> None:
    bench.save(10)
    bench.until_sent(10)
    bench.save(20)
    bench.mirror.end()
    assert bench.steps() == [10, 20]
    assert not bench.mirror.outbox.path.exists()
    assert [one["step"] for one in bench.told] == [10, 20]


def test_a_store_away_for_an_hour_gets_what_it_lacks(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    bench.save(10)
    bench.until_sent(10)
    faults.error = ConnectionError("Could not connect to the endpoint URL")
    faults.calls.clear()
    for minute in range(1, 61):
        if minute % 10 == 0:
            bench.save(10 + minute, best=20)
            shutil.rmtree(bench.folder / f"checkpoint-{minute}", ignore_errors=True)  # the local rotation
        bench.clock.advance(60)
    until(lambda: (bench.clock.advance(1), bench.waiting() == {"checkpoint-20", "checkpoint-70"})[1])
    until(lambda: (bench.clock.advance(1), "cannot be written" in caplog.text)[1])  # the thread may come late to it all
    assert len(faults.calls) < 200  # pauses grow
    faults.error = None
    bench.until_sent_again(20)
    until(lambda: (bench.clock.advance(1), "answers again" in caplog.text)[1])
    assert bench.steps() == [10, 20, 70]  # what came between was replaced by the newest while it waited
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 2
    assert "ConnectionError: Could not connect" in said[0]
    assert "answers again after" in said[1]


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("The provided token has expired."),
        OSError(122, "Disk quota exceeded"),
        TimeoutError(),
        RuntimeError("503 Slow Down"),
    ],
    ids=["credentials", "quota", "slow", "busy"],
)
def test_whatever_the_store_says_training_goes_on_and_later_attempt_sends_it(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    faults.error = error
    bench.save(10)
    until(lambda: "cannot be written" in caplog.text)
    assert type(error).__name__ in caplog.text
    faults.error = None
    bench.until_sent_again(10)


def test_a_store_that_keeps_failing_is_named_once_for_each_cause(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(6):
        kind = ConnectionError if number % 2 else TimeoutError
        faults.error = kind(f"request {number}a{number}f failed after {number} s")
        bench.save(10 + number)
        until(lambda number=number: len([one for one in bench.told if "error" in one]) == number + 1)  # type: ignore[misc]
        faults.error = None
        bench.until_sent_again(10 + number)
        until(lambda: bench.mirror._outage is None)
    bench.end()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([text for text in said if "cannot be written" in text]) == 2
    assert len([text for text in said if "answers again" in text]) == 2
    assert [text for text in said if "4 more times" in text]
    assert len(said) == 5


def test_an_outbox_that_cannot_be_written_is_named_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", f"file {args[-1]}")

    monkeypatch.setattr(bench.mirror.outbox.files, "take_in", refuse)
    for step in (10, 20, 30):
        bench.save(step)
    bench.end()
    assert caplog.text.count("cannot be prepared") == 1
    assert "more times" in caplog.text


def test_a_store_that_hangs_holds_up_no_save(bench: Bench, faults: Faults) -> None:
    bench.save(1)
    bench.until_sent(1)
    faults.answers.clear()
    bench.save(10)
    until(lambda: any("checkpoint-10" in call for call in faults.calls))
    threads = threading.active_count()
    for step in (20, 30, 40):
        bench.save(step)
    assert threading.active_count() == threads  # one upload is under way, whatever is saved meanwhile
    faults.answers.set()
    bench.until_sent(40)
    assert bench.steps() == [1, 10, 40]  # the newest took the place of those that waited


def test_credentials_are_read_anew_at_each_attempt(bench: Bench, faults: Faults) -> None:
    made: list[object] = []
    store = bench.mirror._store
    reconnect = store.reconnect
    store.reconnect = lambda: (made.append(1), reconnect())  # type: ignore[method-assign]
    faults.error = PermissionError("The provided token has expired.")
    bench.save(10)
    while len(made) < 3:
        bench.clock.advance(1)
        time.sleep(0.005)
    faults.error = None


def test_a_run_ending_without_its_store_says_what_is_missing_and_where(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.error = ConnectionError("away")
    bench.save(10)
    bench.end()
    assert module.END_PATIENCE_S <= bench.clock.now() < 600
    assert "has no copy of checkpoint-10" in caplog.text
    assert str(bench.mirror.outbox.path) in caplog.text
    faults.error = None
    bench.mirror = bench.new_mirror()
    bench.begin(continues=True)  # the next training in the directory
    bench.until_sent(10)


def test_a_fresh_run_does_not_send_what_an_earlier_one_left(bench: Bench, faults: Faults) -> None:
    faults.error = ConnectionError("away")
    bench.save(10)
    bench.end()
    faults.error = None
    bench.mirror = bench.new_mirror()
    bench.begin(continues=False)
    bench.save(20)
    bench.until_sent(20)
    assert bench.steps() == [20]


def test_copies_are_as_far_apart_as_asked_whatever_the_clock_does(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every_s=3600)
    bench.begin()
    for step, written_at in ((1, 10_000), (2, 12_000), (3, 13_700), (4, 13_800), (5, 50), (6, 60)):
        bench.save(step, written_at=written_at)
        if step in (1, 3, 5):
            bench.until_sent(step)
    bench.mirror.end()  # and the last one, at the end
    assert bench.steps() == [1, 3, 5, 6]


def test_the_newest_and_the_best_copies_are_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep_last=2)
    bench.begin()
    for step in (1, 2, 3, 4, 5):
        bench.save(step, best=min(step, 2))
        bench.until_sent(step)
    bench.mirror.end()
    assert bench.steps() == [2, 5]  # the best counts


def test_the_best_is_copied_with_the_next_one_that_is_due(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every_s=3600)
    bench.begin()
    for step, written_at in ((1, 0), (2, 100), (3, 200), (4, 3600)):
        bench.save(step, best=2 if step > 1 else 1, written_at=written_at)
    bench.mirror.end()
    assert {2, 4} <= set(bench.steps())


def test_copy_whose_evaluation_is_open_is_kept_until_its_result_is_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep_last=1)
    kept = {1, 2}
    bench.mirror.keeps = lambda: kept
    bench.begin()
    for step in (1, 2, 3):
        bench.save(step, best=None)
        bench.until_sent(step)
    assert bench.steps() == [1, 2, 3]
    kept.remove(2)  # its result is there, and no better than that of 1
    bench.save(4, best=None)
    bench.until_sent(4)
    bench.mirror.end()
    assert bench.steps() == [1, 4]


def test_the_best_that_is_known_after_the_last_save_is_copied(tmp_path: Path) -> None:
    bench = Bench(tmp_path, every_s=3600, keep_last=2)
    bench.begin()
    for step, written_at in ((1, 0), (2, 100), (3, 200)):
        bench.save(step, written_at=written_at)
    bench.until_sent(1)
    bench.mirror.keeps = lambda: {2}  # as an evaluation says that came last
    bench.mirror.end()
    assert {2, 3} <= set(bench.steps())


def test_another_run_that_has_url_ends_the_copies_and_not_the_training(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.save(10)
    bench.until_sent(10)
    bench.claim.is_lost = True
    bench.save(20)
    until(lambda: "belongs to process 7" in caplog.text)
    bench.save(30)
    bench.mirror.end()
    assert bench.steps() == [10]
    assert caplog.text.count("belongs to process 7") == 1


def test_checkpoint_that_was_changed_after_save_is_copied_as_it_is_now(bench: Bench, faults: Faults) -> None:
    faults.error = ConnectionError("away")
    path = bench.save(10)
    until(lambda: len(faults.calls) > 0)
    (path / "model.safetensors").write_text("edited in place")
    manifest = Manifest.read(path)
    assert manifest is not None
    listed = replace(manifest, files=describe_files(path))
    (path / "manifest.json").unlink()
    listed.write(path)
    faults.error = None
    bench.until_sent_again(10)
    assert bench.steps() == [10]
    (found,) = RemoteStore(bench.url).manifests()
    assert found.identity == listed.identity


def test_a_checkpoint_that_was_damaged_is_not_copied_and_holds_up_nothing(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.error = ConnectionError("away")
    path = bench.save(10)
    until(lambda: len(faults.calls) > 0)
    (path / "model.safetensors").write_text("damaged")
    faults.error = None
    until(lambda: (bench.clock.advance(1), "is not copied" in caplog.text)[1])
    bench.save(20)
    bench.until_sent_again(20)
    assert bench.steps() == [20]


def test_the_files_of_the_run_come_along(bench: Bench) -> None:
    (bench.folder / "incidents" / "step-3").mkdir(parents=True)
    (bench.folder / "incidents" / "step-3" / "why.json").write_text("{}")
    (bench.folder / "notes.txt").write_text("of the user")
    (bench.folder / "quarantine.jsonl").symlink_to("/etc/hostname")
    (bench.folder / "journal.jsonl").write_text("one\n")
    bench.save(10)
    bench.until_sent(10)
    (bench.folder / "journal.jsonl").write_text("one\ntwo\n")
    bench.mirror.end()
    store = RemoteStore(bench.url)
    assert store.run_files() == ["journal.jsonl", "incidents/step-3/why.json"]
    assert store.read("journal.jsonl") == b"one\ntwo\n"


def test_secrets_in_an_error_of_the_store_are_masked(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    faults.error = RuntimeError("GET https://me:pass-word@host/?X-Amz-Signature=abcdef wJalrXUtnFEMI/K7MDENG")
    bench.save(10)
    until(lambda: len(bench.told) > 0)
    said = f"{bench.told} {caplog.text}"
    assert "RuntimeError" in said
    for secret in ("wJalrXUtnFEMI", "pass-word", "abcdef"):
        assert secret not in said


def test_the_speed_is_limited_on_average() -> None:
    class Counting(TestClock):
        def wait(self, event: threading.Event, seconds: float | None) -> None:
            assert seconds is not None
            self.advance(seconds)

    clock = Counting()
    pace = Pace(1e6, clock)
    for _ in range(50):
        pace(100_000)
    assert clock.now() == pytest.approx(4.9)  # the last piece goes without a wait after it
    Pace(None, clock)(10**12)
    assert clock.now() == pytest.approx(4.9)


def test_upload_waits_for_save_and_no_longer_than_it_was_free_before() -> None:
    class Counting(TestClock):
        def wait(self, event: threading.Event, seconds: float | None) -> None:
            assert seconds is not None
            assert not event.is_set()
            self.advance(seconds)

    clock = Counting()
    pace = Pace(None, clock)
    clock.advance(30)
    pace.hold()
    pace(1)  # the save failed, so nobody releases it
    assert clock.now() == 60
    pace.hold()  # saves in a row
    pace(1)
    assert clock.now() == 60
    clock.advance(10)
    pace.hold()
    pace.release()
    pace(1)
    assert clock.now() == 70
    clock.advance(10_000)
    pace.hold()
    pace(1)
    assert clock.now() == 10_070 + module_of_pace.HOLD_S


def test_a_copy_takes_the_time_that_its_speed_allows(tmp_path: Path) -> None:
    bench = Bench(tmp_path, bytes_per_s=1e6)
    bench.begin()
    bench.save(10, content="w" * 5_000_000)
    while not bench.told:
        bench.clock.advance(0.1)
        time.sleep(0.005)
    assert bench.clock.now() > 3.9  # the last megabyte goes without a wait after it
    bench.end()
    assert bench.steps() == [10]


def test_a_copy_waits_in_links_where_the_disk_has_them(bench: Bench, faults: Faults) -> None:
    faults.error = ConnectionError("away")
    path = bench.save(10)
    link = bench.mirror.outbox.path / "checkpoint-10" / "model.safetensors"
    assert os.path.samefile(link, path / "model.safetensors")
    faults.error = None


def test_a_disk_without_links_gets_copies(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(module.os, "link", refused)
    bench.save(10)
    bench.until_sent(10)
    assert bench.steps() == [10]


def test_an_upload_and_a_download_hold_a_few_blocks_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    monkeypatch.setattr(remote_module, "READ_BYTES", 1_000)
    monkeypatch.setattr(remote_module, "MOST_READ_BYTES", 1_000)
    store = RemoteStore((tmp_path / "store").as_uri())
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(os.urandom(100_500))
    manifest = Manifest(step=1, run_id="run", files=describe_files(folder))
    store.upload(folder, manifest, number=1)
    out = 0
    most = 0
    for _, blocks in store._contents(Copy(1, 1), {"model.safetensors": 100_500}):
        for _ in blocks:
            out += 1
            read = sum(call.startswith("cat_file") for call in faults.calls)
            most = max(most, read - out)
    assert out == 101
    assert 0 < most <= remote_module.NUM_AHEAD


# -- whatever a client does, the thread serves its run until the end ---------------------------------------------------


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_no_exception_of_a_client_ends_the_copies(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    faults.error = error
    bench.save(10)
    until(lambda: "cannot be written" in caplog.text)
    assert type(error).__name__ in caplog.text
    faults.error = None
    bench.until_sent_again(10)
    bench.save(20)
    bench.until_sent(20)
    assert caplog.text.count("cannot be written") == 1


CALLS = ["pipe_file", "open", "find", "rm_file", "ls", "info"]


@pytest.mark.parametrize("call", CALLS)
def test_run_ends_within_a_minute_though_a_call_of_the_store_hangs(
    bench: Bench, faults: Faults, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(module_of_pace, "LOOK_S", 0.001)  # a second of the test's clock passes in 5 ms
    thread = bench.mirror._thread
    assert thread is not None
    bench.save(1)
    bench.until_sent(1)
    bench.mirror._sent = None  # so that the next attempt lists the copies too
    faults.hangs_at = call
    faults.answers.clear()
    bench.save(10)
    until(faults.is_hanging.is_set)  # before seconds pass, however busy the machine is
    bench.end()
    assert bench.clock.now() < 60
    assert "has no copy of checkpoint-10: the store does not answer" in caplog.text
    assert str(bench.mirror.outbox.path) in caplog.text
    faults.answers.set()  # an hour later
    thread.join(REAL_S)
    assert not thread.is_alive()
    assert bench.steps() == [1]  # it waits for the next run in the directory


def test_a_slow_upload_that_gets_on_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, bytes_per_s=1e5)
    bench.begin()
    bench.save(10, content="w" * 20_000_000)
    ending = threading.Thread(target=bench.mirror.end)
    ending.start()
    while ending.is_alive():
        # The upload has given its sign, and waits for its turn.
        until(lambda: bench.clock.is_waited_for() or not ending.is_alive())
        bench.clock.advance(1)
    assert bench.clock.now() > 150
    assert bench.steps() == [10]


def test_links_in_the_outbox_are_no_checkpoints(bench: Bench, tmp_path: Path) -> None:
    bench.save(10)
    bench.until_sent(10)
    shutil.copytree(bench.folder / "checkpoint-10", tmp_path / "victim")
    bench.mirror.outbox.path.mkdir(exist_ok=True)
    (bench.mirror.outbox.path / "checkpoint-30").symlink_to(tmp_path / "victim")
    bench.save(20)
    bench.until_sent(20)
    bench.mirror.end()
    assert (tmp_path / "victim" / "model.safetensors").is_file()
    assert bench.steps() == [10, 20]


# -- a lease that is lost ----------------------------------------------------------------------------------------------


def test_copies_have_the_number_of_their_lease_and_the_last_stays(
    bench: Bench,
) -> None:
    bench.save(10)
    bench.until_sent(10)
    bench.claim.number = 4  # lost, and taken again
    bench.save(10, content="anew")
    bench.until_copies_are("checkpoint-10-4")
    assert bench.steps() == [10]


def test_lease_that_is_lost_during_upload_and_taken_again_makes_copy_anew(bench: Bench, faults: Faults) -> None:
    faults.hangs_at = "open"
    faults.answers.clear()
    bench.save(10)
    until(lambda: any("checkpoint-10-3" in call for call in faults.calls))
    bench.claim.number = 5
    faults.answers.set()
    bench.until_sent_again(10)
    assert [copy for copy, _ in RemoteStore(bench.url).found()] == [Copy(10, 5)]


def test_run_that_lost_lease_replaces_no_file_of_run_that_has_url(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.save(10)
    bench.until_sent(10)
    RemoteStore(bench.url).overwrite("journal.jsonl", b"of the new run")
    (bench.folder / "journal.jsonl").write_text("of the old run")
    bench.claim.is_lost = True
    bench.save(20)
    until(lambda: "belongs to process 7" in caplog.text)
    assert RemoteStore(bench.url).read("journal.jsonl") == b"of the new run"
