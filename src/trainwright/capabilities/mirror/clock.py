"""Time as the threads of a mirror see it, so that a test may have a time of its own; and the limit of the speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class MirrorClock(Protocol):
    """Time as the thread sees it."""

    def now(self) -> float:
        """Returns seconds that never go back."""

    def wait(self, event: threading.Event, seconds: float | None) -> None:
        """Waits until the event is set, with a limit in seconds; None: no limit."""


class SystemClock:
    """The clock of the machine."""

    def now(self) -> float:
        """Returns the monotonic clock."""
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float | None) -> None:
        """Waits for the event."""
        event.wait(seconds)


# At the end of a run, while every attempt fails, or a call of the store does not return. The rest of a minute is for
# the lease. A file is sent in parts of 16 MB, so a link that is slower than 0.4 MB/s counts as one that hangs.
END_PATIENCE_S = 45.0
LOOK_S = 0.1  # how often a wait looks whether it is over


class Signs:
    """Signs of a thread that it gets on, by which its end is awaited: a call that hangs cannot be ended."""

    def __init__(self) -> None:
        self._count = 0

    def give(self) -> None:
        """Counts one."""
        self._count += 1

    def wait_for(self, thread: threading.Thread, clock: MirrorClock) -> bool:
        """Waits for the thread's end; False if it gave no sign for `END_PATIENCE_S`, and is left to itself."""
        count = self._count
        since = clock.now()
        while thread.is_alive():
            if count != self._count:
                count = self._count
                since = clock.now()
            if clock.now() - since >= END_PATIENCE_S:
                return False
            thread.join(LOOK_S)
        return True


SIGN_S = 10.0  # between two signs of an upload that waits for its turn
HOLD_S = 60.0  # the longest wait for a save


class Pace:
    """Limits the speed of an upload by waiting, and lets a save of the run go first.

    Args:
        bytes_per_s: the limit; None: no limit.
        clock: gives the time, and waits.
    """

    def __init__(self, bytes_per_s: float | None, clock: MirrorClock) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0  # when the bytes sent so far have taken as long as the limit asks
        self._never = threading.Event()
        self.sign: Callable[[], None] = lambda: None  # called whenever bytes are sent
        self._released = threading.Event()
        self._released_at = clock.now()
        self._held_until = self._released_at

    def hold(self) -> None:
        """Lets nothing pass until `release`: a save copies, hashes and writes, and an upload would slow it down.

        It lasts at most as long as uploads were free before, so that saves in a row do not stop them.
        """
        now = self._clock.now()
        if self._held_until <= now:
            self._released_at = max(self._released_at, self._held_until)
            self._released.clear()
            self._held_until = now + min(now - self._released_at, HOLD_S)

    def release(self) -> None:
        """Lets uploads continue."""
        self._released_at = self._held_until = self._clock.now()
        self._released.set()

    def __call__(self, num_bytes: int) -> None:
        """Waits until this number of bytes may be sent."""
        self.sign()
        while (now := self._clock.now()) < self._held_until:
            self._clock.wait(self._released, self._held_until - now)
        if self.bytes_per_s is None:
            return
        while (now := self._clock.now()) < self._free_at:
            self._clock.wait(self._never, min(self._free_at - now, SIGN_S))
            self.sign()
        self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_s
