"""Interrupts: signals that end a run, at once if nothing is half done, otherwise at the end of the step.

The first signal is a request, obeyed at the end of the current step, or at once while the loop waits for data or
evaluates. Schedulers and `timeout` send several: signals within a grace period do not abort the save that the
first one started. A signal after it, and a second SIGINT at any time, end the process as if there were no handler.

Several runs may be alive in the main thread: two loops over `steps()` that take turns, or a training in a callback of
another one. They share one handler, which notifies all of them; each saves its own last step. The handlers of
the process are put back when the last of them ends, in whatever order they end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from trainwright.support.host import in_notebook

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))
PASS_ON_AFTER_S = 0.05
Handler = Any  # result of `signal.getsignal`: a callable, a member of `signal.Handlers`, or None


class Interrupted(BaseException):
    """A signal arrived at a point at which the run may end at once. No `except Exception` catches it."""


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
        self._request: StopRequest | None = None  # the signal of this process that the run has to obey
        self._seen: dict[int, float] = {}  # signals to this process, and when each came first
        self._grace_s = 0.0
        self._lost: Callable[[], str] = str

    @contextmanager
    def listening(self, *, grace_s: float = 0.0, lost: Callable[[], str] = str) -> Iterator[None]:
        """Listens to signals within the context. Only the main thread can do so; others change nothing.

        A signal that is ignored, as SIGINT in background jobs of a script, stays ignored. For `grace_s` after
        the first signal others do not end the process at once; `lost` names the unsaved steps.

        The context may end in another thread, as that of a generator does which is collected there. If it is left
        early (`break`, or a collected generator) with a signal that no run has obeyed, the signal is sent again, to the
        handlers from before the run.
        """
        self.received = None
        self._is_open = False
        self._is_handed_on = False
        self._request = None
        self._seen = {}
        self._grace_s = grace_s
        self._lost = lost
        if not is_main_thread():
            yield
            return
        _table.add(self)
        try:
            yield
        except GeneratorExit:
            self._end()
            self._pass_on()
            raise
        finally:
            self._end()

    def _end(self) -> None:
        self._is_open = False
        _table.remove(self)

    def _pass_on(self) -> None:
        """Sends a signal again that this run has received, unless a run has obeyed it or is about to."""
        request = self._request
        if request is None or request.is_obeyed or any(one._request is request for one in _table.live):
            return
        request.is_obeyed = True
        # Python drops an exception that a handler raises while a generator is collected: KeyboardInterrupt comes later.
        sender = threading.Timer(PASS_ON_AFTER_S, os.kill, (os.getpid(), request.number))
        sender.daemon = True
        sender.start()

    def open(self) -> None:
        """Has a signal raise Interrupted at once from now on; so does an earlier signal."""
        self._is_open = True
        _table.running = self
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

    def ends_at_once(self, number: int, now: float) -> bool:
        """Returns True if this signal came too late after the first one, or is a second SIGINT."""
        is_over = now - min(self._seen.values(), default=now) > self._grace_s
        return is_over or (number == signal.SIGINT and number in self._seen)

    def lost(self) -> str:
        """Names the steps that are lost if the process ends at once."""
        return self._lost()

    def note(self, request: StopRequest, now: float) -> None:
        """Remembers a signal; of several processes, the others are notified."""
        self._seen.setdefault(request.number, now)
        if self.received is not None or self._is_handed_on:
            return
        self._request = request
        if self.meeting is not None and self.meeting.is_shared:
            self._is_handed_on = True
            self.meeting.ask(request.number)
            return
        self.received = request.number

    def raise_if_open(self) -> None:
        """Raises Interrupted for a signal received at a point at which the run may end at once."""
        if self._is_open and self.received is not None:
            self.close()
            raise Interrupted

    @property
    def was_signalled(self) -> bool:
        """Returns True if a signal has come, whether or not all processes have agreed on the last step."""
        return bool(self._seen)

    def leave(self) -> None:
        """Ends the process as the received signal, if any, would: KeyboardInterrupt, or exit code 128 + its number."""
        if self.received is not None and self._request is not None:
            self._request.is_obeyed = True
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)


@dataclass(eq=False, slots=True)
class StopRequest:
    """One signal, as all runs that were alive when it came know it."""

    number: int
    is_obeyed: bool = False  # a run has saved its last step and leaves


# -- the handlers of the process ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class HandlerTable:
    """The runs that listen, and the handlers that the process had before the first of them."""

    live: list[Interrupts] = field(default_factory=list)  # oldest first
    running: Interrupts | None = None  # the run that began or opened last: the others wait for it
    previous: dict[int, Handler] = field(default_factory=dict)
    holds: int = 0  # contexts of `held_back` that are open
    held: list[int] = field(default_factory=list)  # signals received within

    def add(self, listener: Interrupts) -> None:
        """Begins to listen; called in the main thread."""
        if not self.live:
            self.put_back()  # handlers of runs that ended in other threads
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, _handle):
                self.previous[number] = handler
                signal.signal(number, _handle)
        self.live.append(listener)
        self.running = listener

    def remove(self, listener: Interrupts) -> None:
        """Ends listening. In another thread than the main one the handlers stay, and pass signals on."""
        if listener not in self.live:
            return
        self.live.remove(listener)
        if self.running is listener:
            self.running = self.live[-1] if self.live else None
        if not self.live and is_main_thread():
            self.put_back()

    def put_back(self) -> None:
        """Puts the handlers of the process back."""
        while self.previous:
            number, handler = self.previous.popitem()
            if number in SIGNALS or signal.getsignal(number) is _handle_child:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def receive(self, number: int) -> None:
        """Notifies all runs of a signal; raises Interrupted if the running one may end at once."""
        if not self.live:
            self.put_back()
            signal.raise_signal(number)
            return
        now = time.monotonic()
        for listener in reversed(self.live):
            if listener.ends_at_once(number, now):
                end_at_once(number, listener.lost())
                return
        request = StopRequest(number)
        for listener in self.live:
            listener.note(request, now)
        self.tolerate_dead_workers()
        if self.running is not None:
            self.running.raise_if_open()

    def tolerate_dead_workers(self) -> None:
        """Makes the death of a worker no error from now on: the signal ended it too.

        torch's handler of SIGCHLD would raise wherever this process is, in the middle of a save too.
        """
        handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
        if callable(handler) and handler is not _handle_child:
            self.previous[signal.SIGCHLD] = handler
            signal.signal(signal.SIGCHLD, _handle_child)


_table = HandlerTable()


def _handle(number: int, frame: FrameType | None) -> None:
    if _table.holds:
        _table.held.append(number)
        _table.tolerate_dead_workers()
    else:
        _table.receive(number)


def _handle_child(number: int, frame: FrameType | None) -> None:
    """Calls the handler from before; an error that it raises counts only if no run was signalled."""
    try:
        _table.previous[number](number, frame)
    except RuntimeError:
        if not _table.held and not any(listener.was_signalled for listener in _table.live):
            raise


def end_at_once(number: int, lost: str) -> None:
    """Ends the process as if nothing handled the signal, with a line about lost steps."""
    if number == signal.SIGINT and in_notebook():  # the process of a notebook holds more than this run
        raise KeyboardInterrupt
    text = f"{signal.Signals(number).name} again: the process ends at once; {lost}.\n"
    os.write(2, text.encode())  # a handler may interrupt a print
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def is_main_thread() -> bool:
    """Returns True in the thread that may set handlers, and in which Python calls them."""
    return threading.current_thread() is threading.main_thread()


# -- processes that a run starts ---------------------------------------------------------------------------------------


@contextmanager
def held_back() -> Iterator[None]:
    """Holds signals back while workers are started; they are handled at the end of the context.

    Otherwise an exception of a handler would leave half of the workers behind, and a worker would run the handler of
    this process before it has its own.
    """
    if not is_main_thread():
        yield
        return
    _table.holds += 1
    try:
        yield
    finally:
        _table.holds -= 1
        while _table.held and not _table.holds:
            _table.receive(_table.held.pop(0))


@contextmanager
def blocked() -> Iterator[None]:
    """Blocks the signals of this thread within the context: a process that is started here has them blocked too.

    It calls `leave_signals_to_parent` before anything else.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Ignores the signals in a process that was started while they were `blocked`."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _forget_runs() -> None:
    """In a forked process, the runs of its parent do not listen: signals go to the handlers from before them."""
    _table.live.clear()
    _table.held.clear()
    _table.running = None
    _table.holds = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_runs)
