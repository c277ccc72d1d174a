"""TrackerThread: runs a tracker's calls on their own thread. A call that fails or hangs does not affect training.

A call that raises is tried again. After several failed calls the tracker is disabled until the end of the run, when it
gets the missing values from the journal. A call that hangs delays only later calls: the queue is bounded, and values of
calls that do not fit are sent at the end too.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

QUEUE_LENGTH = 1024
NUM_TRIES = 3
PAUSE_S = 0.05  # before the second try, doubled before each further one
FAILURES_TO_STOP = 3  # calls in a row
FLUSH_TIMEOUT_S = 10.0

Call = Callable[[], None]


class TrackerThread:
    """Runs calls one after the other in the background; `is_disabled` after several in a row failed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_disabled = False
        self._calls: queue.Queue[tuple[Call, Call | None]] = queue.Queue(QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._num_failures = 0
        self._has_warned = False

    def submit(self, call: Call, *, missed: Call | None = None) -> None:
        """Queues a call, tried three times at most; `missed` runs (on either thread) if it is dropped; None: none."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
            self._thread.start()
            atexit.register(self.flush)
        try:
            self._calls.put_nowait((call, missed))
        except queue.Full:
            self._warn(f"{self.name} does not keep up; what it misses is sent at the end of the run.")
            if missed is not None:
                missed()

    @property
    def is_used(self) -> bool:
        """Returns True if a call was ever queued."""
        return self._thread is not None

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all queued calls are made, 10 seconds by default; returns False if calls are left then."""
        limit = time.monotonic() + (FLUSH_TIMEOUT_S if timeout_s is None else timeout_s)
        with self._calls.all_tasks_done:
            while self._calls.unfinished_tasks:
                remaining = limit - time.monotonic()
                if remaining <= 0:
                    return False
                self._calls.all_tasks_done.wait(remaining)
        return True

    def reopen(self) -> None:
        """Enables a disabled tracker again."""
        self.is_disabled, self._num_failures = False, 0

    def _work(self) -> None:
        while True:
            call, missed = self._calls.get()
            try:
                if missed is None:
                    self._succeeds(call)
                elif self.is_disabled or not self._succeeds(call):
                    missed()
                else:
                    self._num_failures = 0
            finally:
                self._calls.task_done()
                del call, missed

    def _succeeds(self, call: Call) -> bool:
        for attempt in range(NUM_TRIES):
            try:
                call()
            except Exception as error:
                self._warn(f"{self.name} failed: {type(error).__name__}: {error}. Training goes on; it is tried again.")
                time.sleep(PAUSE_S * 2**attempt if attempt + 1 < NUM_TRIES else 0)
            else:
                return True
        self._num_failures += 1
        if self._num_failures >= FAILURES_TO_STOP and not self.is_disabled:
            self.is_disabled = True
            logger.warning("%s is left alone until the end of the run: %d calls in a row failed.", self.name,
                           self._num_failures)  # fmt: skip
        return False

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            logger.warning("%s", text)
        self._has_warned = True


class PendingCalls:
    """Names of the values that a tracker did not get, by step. Two threads add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, set[str]] = {}

    def add(self, step: int, names: Iterable[str]) -> None:
        """Adds the names of values of a step."""
        with self._lock:
            self._names.setdefault(step, set()).update(names)

    def take(self) -> dict[int, set[str]]:
        """Returns names by step and clears them."""
        with self._lock:
            names, self._names = self._names, {}
            return names

    def __len__(self) -> int:
        return sum(map(len, self._names.values()))
