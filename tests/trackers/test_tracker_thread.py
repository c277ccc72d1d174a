"""The guard: order, retries, giving up, a full queue."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.journal.record import FileJournal
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.trackers import base
from trainwright.trackers.base import TrackerCallback, TrackerThread


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PAUSE_S", 0.0)


def test_calls_are_made_in_order_on_one_other_thread() -> None:
    made: list[Any] = []
    one = TrackerThread("one")
    for i in range(20):
        one.submit(lambda i=i: made.append((i, threading.current_thread())))  # type: ignore[misc]
    assert one.flush(30)
    assert [i for i, _ in made] == list(range(20))
    assert {thread for _, thread in made} != {threading.current_thread()}
    assert len({thread for _, thread in made}) == 1


def test_call_that_raises_is_tried_again_and_counts_once_it_works() -> None:
    tries: list[int] = []

    def second_time() -> None:
        tries.append(1)
        if len(tries) < 2:
            raise OSError("not now")

    one = TrackerThread("one")
    missed = []
    one.submit(second_time, missed=lambda: missed.append(1))
    assert one.flush(30)
    assert (len(tries), missed, one.is_disabled) == (2, [], False)


def test_after_three_failed_calls_in_row_it_is_left_alone_until_reopened(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []
    one = TrackerThread("one")
    missed = []

    def fails() -> None:
        tries.append(1)
        raise OSError("never")

    for _ in range(10):
        one.submit(fails, missed=lambda: missed.append(1))
    assert one.flush(30)
    assert one.is_disabled
    assert (len(tries), len(missed)) == (base.FAILURES_TO_STOP * base.NUM_TRIES, 10)
    assert caplog.text.count("OSError: never") == 1
    one.reopen()
    one.submit(lambda: tries.clear())
    assert one.flush(30)
    assert tries == []


def test_values_beyond_the_queue_are_dropped_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "QUEUE_LENGTH", 4)
    one = TrackerThread("one")
    missed = []
    go_on = threading.Event()
    for _ in range(20):
        one.submit(lambda: go_on.wait(30) and None, missed=lambda: missed.append(1))
    assert len(missed) >= 15
    assert not one.flush(0.01)
    go_on.set()
    assert one.flush(30)


def test_what_was_missed_is_sent_once_and_stays_missed_if_that_fails(tmp_path: Path) -> None:
    sent: list[tuple[int, dict[str, object]]] = []
    fails = [True]

    class Tracker(TrackerCallback):
        def send(self, values: dict[str, object], state: TrainerState) -> None:
            if fails.pop():
                raise OSError("away")
            sent.append((state.global_step, values))

    journal = FileJournal(tmp_path, "run")
    journal.write("start", step=0)
    for step in (1, 2):
        journal.write("log", step=step, values={"loss": 0.5, "epoch": 0.1})
    args: Any = SimpleNamespace(output_dir=str(tmp_path))
    tracker = Tracker()
    state = TrainerState()
    tracker._missed |= {(2, "loss"), (7, "loss")}
    with pytest.raises(OSError, match="away"):
        tracker._backfill(args, state, None)
    assert len(tracker._missed) == 2
    for _ in range(2):
        fails.append(False)
        tracker._backfill(args, state, None)
    assert sent == [(2, {"loss": 0.5})]
    assert tracker._missed == {(7, "loss")}  # the journal does not have it


def test_the_thread_ends_with_its_tracker_after_all_calls_are_made() -> None:
    made: list[int] = []
    begun = threading.Event()

    def slow() -> None:
        begun.wait(30)
        made.append(1)

    one = TrackerThread("one")
    one.submit(slow)
    one.submit(lambda: made.append(2), missed=lambda: made.append(3))
    assert one.thread is not None
    thread = one.thread
    one.flush(0)
    del one
    begun.set()
    thread.join(30)
    assert not thread.is_alive()
    assert made == [1, 2]


def test_calls_that_are_queued_keep_their_tracker() -> None:
    made: list[int] = []

    class Sends(TrackerCallback):
        name = "sends"

        def send(self, values: dict[str, Any], state: TrainerState) -> None:
            made.append(state.global_step)

    one = Sends()
    for step in range(3):
        state = TrainerState(global_step=step, is_world_process_zero=True)
        one.on_log(SimpleNamespace(output_dir="x"), state, TrainerControl(), logs={"loss": 1.0})
    thread = one._guard.thread
    assert thread is not None
    del one
    thread.join(30)
    assert not thread.is_alive()
    assert made == [0, 1, 2]
