"""Says on standard output that a signal may come, and waits until it is here: for scripts that tests signal."""

from __future__ import annotations

import os
import select
import signal
import time

LIMIT_S = 60.0


def announce(*words: object, num_signals: int = 1) -> None:
    """Prints HERE and `words`, then ARRIVED for each signal that has come, until all have; for the main thread.

    A signal has come when the system has delivered it, before its handler runs, or when it is pending and blocked.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        _print("HERE", *words)
        for _ in range(num_signals):
            _wait(read)
            _print("ARRIVED")
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def _wait(read: int) -> None:
    """Returns when a signal has come since the last call; a handler may raise before."""
    end = time.monotonic() + LIMIT_S
    while not signal.sigpending():
        if select.select([read], [], [], 0.01)[0]:
            os.read(read, 1)
            return
        assert time.monotonic() < end, "no signal has come"


def _print(*words: object) -> None:
    # Not `print`: a handler that raises in its lock would leave a part of the line for the next one.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
