"""Calls and commands with a limit of time, where what is called knows none."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")
KILLED_S = 10.0  # for the end of a process that was killed
REAPS_S = 3600.0  # for the end of one that did not end then
STARTS_WITHIN_S = 10.0  # a fork waits no longer for a process that another thread starts


class HangsError(TimeoutError):
    """A call has not returned in time; a second attempt would wait as long."""


class _TimedCall(Generic[T]):
    """A call on a thread of its own, which is left to itself if it does not return."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="trainwright-deadline", daemon=True)

    def _work(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error

    def ends_within(self, seconds: float) -> bool:
        """Starts the call; returns whether it has ended in time."""
        self._thread.start()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> T:
        """Returns what the call returned, or raises what it raised."""
        error = self._error
        self._error = None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or its traceback, with all that its frames have, waits for a garbage collection
        return self._results[0]


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Calls a function on a thread of its own; False if it has not returned in time, and it is left to itself.

    Whatever the function raises is lost.
    """
    return _TimedCall(call).ends_within(seconds)


def call_within(seconds: float, call: Callable[[], T], *, what: str) -> T:
    """Calls a function on a thread of its own; returns its result, or raises its error.

    Raises:
        HangsError: it has not returned in time, and is left to itself; the text has `what` was waited for.
    """
    made = _TimedCall(call)
    if not made.ends_within(seconds):
        raise HangsError(f"{what} has not answered for {seconds:g} s")
    return made.result()


def start_process(command: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
    """Starts a process, as `subprocess.Popen` does with these settings; forks of other threads wait meanwhile.

    `Popen` waits until all ends of a pipe are closed. A process that is forked in between, such as a worker of a
    dataloader, has one of them for as long as it lives.
    """
    with _starting:
        return subprocess.Popen(command, **settings)


_starting = threading.Lock()
_forking = threading.local()


def _before_fork() -> None:
    _forking.waited = _starting.acquire(timeout=STARTS_WITHIN_S)


def _after_fork() -> None:
    if _forking.waited:
        _starting.release()


def _after_fork_in_child() -> None:
    global _starting
    _starting = threading.Lock()  # whoever holds the other one is not here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def run_command(
    command: Sequence[str],
    *,
    seconds: float,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a session of its own; when it ends, or time is over, all that it has started is ended too.

    Its output goes to files, so a child of it that holds its output is not waited for.

    Args:
        command: its words.
        seconds: limit of time.
        folder: working directory; None: that of this process.
        environment: variables; None: those of this process.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it has not ended in time.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_process(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        finally:
            end_group(process)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a session and all that it started there, and waits for it."""
    with suppress(ProcessLookupError, PermissionError):  # they have ended; or are another user's
        os.killpg(process.pid, signal.SIGKILL)
    reap(process, limit_s=KILLED_S)


def reap(process: subprocess.Popen[bytes], *, limit_s: float) -> None:
    """Waits for a process that was killed, on a thread if it hangs in the kernel; otherwise it would stay a zombie."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:

        def wait() -> None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(REAPS_S)

        threading.Thread(target=wait, name="trainwright-reaper", daemon=True).start()
