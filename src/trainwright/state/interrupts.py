"""Interrupts: signals that end a run, at once where nothing is half done, otherwise at the end of the step.

The first signal is a request, obeyed at the end of the current step, or at once while the loop waits for data or
evaluates. Schedulers and `timeout` send several: what follows within a grace period does not abort the save that the
first one started. A signal after it, and a second SIGINT at any time, end the process as if there were no handler.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from trainwright.host import in_notebook

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class Interrupted(BaseException):
    """A signal arrived where the run may end at once. No `except Exception` catches it."""


class InterruptSync(Protocol):
    """Agreement of processes on the step at which all end after a signal; for one process it only counts steps.

    Attributes:
        on_hang: called with a message before a run without progress is ended.
    """

    on_hang: Callable[[str], None]

    @property
    def is_shared(self) -> bool:
        """Returns True if there are other processes."""

    def ask(self, number: int) -> None:
        """Publishes the number of a signal to this process."""

    def passes(self) -> int | None:
        """Counts a step; returns the signal after which all processes end here."""


class Interrupts:
    """Handles signals during a run.

    Where several processes train together, none of them may end by itself: a signal is given to `meeting`, and all end
    at the same step, where `passes` raises.
    """

    def __init__(self) -> None:
        self.received: int | None = None  # the signal that ends the run; None while there is none
        self.meeting: InterruptSync | None = None  # agreement of the processes; None: this process ends by itself
        self._is_open = False
        self._is_handed_on = False
        self._seen: dict[int, float] = {}  # signals to this process, and when each came first
        self._grace_s = 0.0
        self._lost: Callable[[], str] = str

    @contextmanager
    def listening(self, *, grace_s: float = 0.0, lost: Callable[[], str] = str) -> Iterator[None]:
        """Installs the signal handlers within the context. Only the main thread can do so; others change nothing.

        A signal that is ignored, as SIGINT is in what a script starts in the background, stays so. For `grace_s` after
        the first signal others do not end the process at once; `lost` says what one that ends at once has not saved.
        """
        self.received, self._is_open, self._is_handed_on = None, False, False
        self._seen, self._grace_s, self._lost = {}, grace_s, lost
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._handle) for number in heard}
        try:
            yield
        finally:
            self._is_open = False
            if threading.current_thread() is not threading.main_thread():  # a `fit_step` run that is collected there
                self._grace_s, previous = -1.0, {}  # the handlers stay, and the next signal ends the process
            for number, handler in previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def open(self) -> None:
        """Has a signal raise Interrupted at once from now on; so does one that came before."""
        self._is_open = True
        if self.received is not None:
            self.close()
            raise Interrupted

    def passes(self) -> None:
        """Counts a step, or a batch of an evaluation; raises Interrupted where all processes end after a signal."""
        if self.meeting is not None:
            number = self.meeting.passes()
            if number is not None:
                self.received = number
        if self.received is not None:
            raise Interrupted

    def close(self) -> None:
        """Has a signal only be remembered from now on."""
        self._is_open = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_over = now - min(self._seen.values(), default=now) > self._grace_s
        if is_over or (number == signal.SIGINT and number in self._seen):
            if number == signal.SIGINT and in_notebook():  # whose process holds more than this run
                raise KeyboardInterrupt
            text = f"{signal.Signals(number).name} again: the process ends at once; {self._lost()}.\n"
            os.write(2, text.encode())  # a handler may interrupt a print
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._seen.setdefault(number, now)
        if self.received is not None or self._is_handed_on:
            return
        if self.meeting is not None and self.meeting.is_shared:
            self._is_handed_on = True
            self.meeting.ask(number)
            return
        self.received = number
        if self._is_open:
            self.close()
            raise Interrupted

    def leave(self) -> None:
        """Ends the process as the received signal, if any, would: KeyboardInterrupt, or exit code 128 + its number."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)
