"""Calls with a limit of time, where what is called knows none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Calls a function on a thread of its own; False if it has not returned in time, and it is left to itself.

    Whatever the function raises is lost.
    """

    def work() -> None:
        with suppress(BaseException):
            call()

    thread = threading.Thread(target=work, name="trainwright-deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
