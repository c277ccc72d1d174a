"""`trainwright ctl`: checks a command, sends it to a run, and waits for the answer."""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from trainwright.capabilities.control.command import parse_command
from trainwright.capabilities.control.inbox import Inbox
from trainwright.errors import ArgumentError, TrainwrightError

POLL_S = 0.1


def give(run: Path, words: Sequence[str], *, wait_s: float) -> tuple[int | None, str | None]:
    """Sends a command to a run.

    Args:
        run: its output directory.
        words: the command and its value.
        wait_s: seconds to wait for the run; a command that no run has accepted by then is withdrawn.

    Returns:
        The step after which it was carried out, and the reason if it was refused.

    Raises:
        ArgumentError: it is not a command, or no run accepts commands there.
        TrainwrightError: the run did not answer in time.
    """
    parse_command(words)
    inbox = Inbox(run)
    if not inbox.is_open:
        raise ArgumentError(
            f"No run in {run} takes commands: it has ended, or was started without live_control=True "
            "(--live_control on the command line)."
        )
    number = inbox.send({"words": list(words), "by": sender()})
    end = time.monotonic() + wait_s
    while True:
        answer = inbox.answer_to(number)
        if answer is not None:
            step = answer.get("step")
            refused = answer.get("refused")
            return step if isinstance(step, int) else None, refused if isinstance(refused, str) else None
        if time.monotonic() >= end:
            break
        time.sleep(POLL_S)
    if inbox.withdraw(number):
        raise TrainwrightError(
            f"No run in {run} accepted the command within {wait_s:g} s, so it was withdrawn: the run may have been "
            "killed. `trainwright runs` shows whether it is alive."
        )
    raise TrainwrightError(
        f"The run accepted the command, but did not carry it out within {wait_s:g} s: it does so between two steps. "
        "Its journal will record it."
    )


def sender() -> str:
    """Returns the user and the machine, in the form used in the journal."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user id without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
