"""Interrupts: signals that end a run. They are let in where nothing is half done, and remembered everywhere else.

The first signal asks: at the end of the step under way, or at once while the loop waits for data or evaluates. A
second one ends the process as if there were no handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class Interrupted(BaseException):
    """A signal arrived at a place where the run may be left at once. No `except Exception` stops it."""


class InterruptSync(Protocol):
    """How processes that train together agree on the place where they leave; alone, it only counts places."""

    @property
    def is_shared(self) -> bool: ...
    def ask(self, number: int) -> None: ...
    def passes(self) -> int | None: ...


class Interrupts:
    """Listens for signals while a run lasts.

    Attributes:
        received: the signal that asked the run to end; None while there is none.

    Where several processes train together, none of them may leave by itself: a signal is handed to `meeting`, and all
    leave at the same place, where `passes` says so.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.meeting: InterruptSync | None = None
        self._is_open = False
        self._is_handed_on = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Installs the handlers, and puts the previous ones back. Only the main thread can do so."""
        self.received, self._is_open, self._is_handed_on = None, False, False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            self._is_open = False
            for number, handler in previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def open(self) -> None:
        """From here on a signal raises Interrupted at once; so does one that came before."""
        self._is_open = True
        if self.received is not None:
            self.close()
            raise Interrupted

    def passes(self) -> None:
        """Called where a step or a batch of an evaluation is done: a signal that all processes know of raises here."""
        if self.meeting is not None:
            number = self.meeting.passes()
            if number is not None:
                self.received = number
        if self.received is not None:
            raise Interrupted

    def close(self) -> None:
        """From here on a signal is only remembered."""
        self._is_open = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None or self._is_handed_on:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.meeting is not None and self.meeting.is_shared:
            self._is_handed_on = True
            self.meeting.ask(number)
            return
        self.received = number
        if self._is_open:
            self._is_open = False
            raise Interrupted

    def leave(self) -> None:
        """Ends the process's work the way the signal asked for: exit code 128 + its number, 130 for SIGINT."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)
