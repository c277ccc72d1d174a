"""A child process that works for a run: how it is started, spoken to and ended, and its side of the pipes.

It leads a session of its own, which is ended as a group, imports nothing from the working directory that its parent
does not, and gets lines on its standard input. It answers with JSON lines on its standard output, and ends with its
parent, also if that is killed while a process that it forked still holds the pipes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from trainwright._types import JSONObject
from trainwright.support.deadline import reap, start_process
from trainwright.support.door import parse_json

LOOKS_EVERY_S = 0.2  # for the end of the child
PARENT_LOOKS_EVERY_S = 1.0  # of a child: whether its parent is still there
WRITE_LIMIT_S = 30.0  # for a line that it does not read
STOP_LIMIT_S = 10.0  # for the end of a process that was killed
IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # they are the run's, which ends the child


def module_command(module: str, *words: str) -> list[str]:
    """Returns the command that runs a module in a new interpreter.

    What lies in the working directory is not imported there, unless this process does so too.
    """
    return [sys.executable, "-P", "-m", module, *words]


def module_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with which a new interpreter finds the modules that this one finds."""
    return {**environ, "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path)}


# -- in the parent -----------------------------------------------------------------------------------------------------


class ChildProcess:
    """A child process, from its start to its end; one thread reads its answers.

    Args:
        command: starts it.
        environment: its variables.
        max_bytes: of a line of its output.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unread = b""  # of its output
        self._lock = threading.Lock()  # of the end
        self._writing = threading.Lock()  # a line is written as a whole
        self.is_silent = False  # whether it wrote no line in time, when it was asked last
        self._process = start_process(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    @property
    def pid(self) -> int:
        """Number of the process, and of its group."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Returns whether the process has ended; it stays a zombie, so that its number still names its group."""
        if self._process.returncode is not None:
            return True
        if not hasattr(os, "waitid"):  # macOS
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # someone else has waited for it
            return True

    def write(self, line: str, *, limit_s: float = WRITE_LIMIT_S) -> bool:
        """Writes a line to its standard input; returns False if it does not read any more, or was stopped."""
        assert self._process.stdin is not None
        left = memoryview(f"{line}\n".encode())
        end = time.monotonic() + limit_s
        with self._writing:
            try:
                poll = select.poll()
                poll.register(self._process.stdin, select.POLLOUT)
                while left:
                    if time.monotonic() >= end:
                        return False
                    if poll.poll(1000 * LOOKS_EVERY_S):
                        # None: another line has taken the room meanwhile
                        left = left[self._process.stdin.write(left) or 0 :]
            except (OSError, ValueError):  # ValueError: this side has closed the pipe
                return False
        return True

    def next_line(self, limit_s: float, *, is_over: Callable[[], bool] = lambda: False) -> JSONObject | None:
        """Returns its next answer; None if it ends or hangs, the line is no answer, or `is_over`."""
        assert self._process.stdout is not None
        end = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._unread and len(self._unread) <= self._max_bytes and time.monotonic() < end:
            has_ended = self.has_ended() or is_over()  # asked first: what it wrote before its end is read
            if poll.poll(0 if has_ended else 1000 * LOOKS_EVERY_S):
                piece = self._process.stdout.read(1 << 16)
                if not piece:
                    break
                self._unread += piece
            elif has_ended:
                break
        self.is_silent = time.monotonic() >= end
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = parse_json(line)
        except ValueError:  # nothing, or half a line of a process that was killed
            return None
        return answer if isinstance(answer, dict) else None

    def end_group(self) -> None:
        """Kills the process and all that it started, and waits for it; nothing if that is done."""
        with self._lock:
            if self._process.returncode is not None:
                return
            with suppress(ProcessLookupError, PermissionError):  # it is reaped by someone else, or another user's
                os.killpg(self._process.pid, signal.SIGKILL)
            reap(self._process, limit_s=STOP_LIMIT_S)

    def describe_end(self) -> str:
        """Ends the process; returns its exit code, or the name of the signal that killed it."""
        self.end_group()  # it may have closed its output, and live on
        code = self._process.returncode
        if code is None:
            return "no exit code"
        if code < 0:
            try:
                return signal.Signals(-code).name
            except ValueError:
                return f"signal {-code}"
        return f"exit code {code}"

    def close(self) -> None:
        """Ends the process, and closes its pipes; the thread that reads its answers calls it."""
        self.end_group()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


# -- in the child ------------------------------------------------------------------------------------------------------


class ParentPipes:
    """Standard input and output of this process, which only it has: its children get others, and so do prints."""

    def __init__(self) -> None:
        self._open = [os.dup(0), os.dup(1)]
        self._requests, self._answers = self._open
        self._lock = threading.Lock()  # a line is written as a whole
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # a child that is forked closes its standard input, which no thread may be reading
        os.close(nothing)
        os.dup2(2, 1)  # prints of the user's code are no answers
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        while self._open:  # empty in the children of children
            os.close(self._open.pop())

    def lines(self, parent: int) -> Iterator[str]:
        """Yields the lines of the parent, until it ends; a child of it may have its end of the pipe."""
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        unread = b""
        while os.getppid() == parent:
            if not poll.poll(1000 * PARENT_LOOKS_EVERY_S):
                continue
            piece = os.read(self._requests, 1 << 16)
            if not piece:
                return
            *lines, unread = (unread + piece).split(b"\n")
            yield from (line.decode() for line in lines)

    def answer(self, **values: object) -> None:
        """Writes an answer."""
        line = f"{json.dumps(values)}\n".encode()
        with self._lock:
            while line:
                line = line[os.write(self._answers, line) :]


def ignore_signals() -> None:
    """Leaves signals to the run."""
    for name in IGNORED_SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def end_own_group() -> None:
    """Ends this process, with the processes that it started if it leads their group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
