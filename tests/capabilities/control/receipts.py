"""Sends messages to a run of this process, and waits until its thread has received them."""

from __future__ import annotations

import threading
from typing import Any

from trainwright.capabilities.control.extension import LiveControl
from trainwright.capabilities.control.inbox import Inbox

LIMIT_S = 60.0


def send_and_wait(inbox: Inbox, *messages: Any) -> list[str]:
    """Returns the ids of the messages, once the run has read all of them and will carry them out after its step.

    A message is gone from the folder before it is in the queue, so that only the thread knows when it is there.
    """
    numbers = [inbox.send(message) for message in messages]
    received = threading.Event()
    receive = LiveControl._receive

    def receive_and_notify(control: LiveControl) -> None:
        receive(control)
        if not any((inbox.folder / f"new-{number}.json").exists() for number in numbers):
            received.set()

    LiveControl._receive = receive_and_notify  # type: ignore[method-assign]
    try:
        assert received.wait(LIMIT_S)
    finally:
        LiveControl._receive = receive  # type: ignore[method-assign]
    return numbers
