"""Inbox: small JSON messages to a run, as files in a directory, and the answers to them.

A message is written as `new-<id>.json` by rename. The run takes it by renaming it to `taken-<id>.json`, and answers
with `answer-<id>.json`. So a message can be withdrawn until it is accepted.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path

from trainwright._types import JSONObject, write_text
from trainwright.support.door import read_json

FOLDER = "_control"  # names that begin with an underscore are not uploaded
OPEN_NAME = "open.json"  # there while a run takes messages
MAX_BYTES = 1 << 12
_NEW = re.compile(r"new-([0-9a-z-]{1,80})\.json")


class Inbox:
    """Messages to the run that writes into a directory.

    Args:
        run_folder: the directory.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self.folder = Path(run_folder) / FOLDER

    # -- the sender ----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Returns True if a run takes messages, or was killed while it did."""
        return (self.folder / OPEN_NAME).is_file()

    def send(self, message: JSONObject) -> str:
        """Writes a message; returns its id. Ids sort by time."""
        number = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        write_text(self._place("new", number), json.dumps(message))
        return number

    def withdraw(self, number: str) -> bool:
        """Removes a message; returns False if it was taken."""
        try:
            self._place("new", number).unlink()
        except FileNotFoundError:
            return False
        return True

    def answer_to(self, number: str) -> JSONObject | None:
        """Returns the answer to a message, and removes it; None if there is none yet."""
        try:
            answer = read_json(self._place("answer", number), max_bytes=MAX_BYTES)
        except (OSError, ValueError):
            return None
        for kind in ("answer", "taken"):
            self._place(kind, number).unlink(missing_ok=True)
        return answer if isinstance(answer, dict) else None

    # -- the receiver --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts accepting messages; messages for an earlier run are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear()
        write_text(self.folder / OPEN_NAME, json.dumps({"pid": os.getpid()}))

    def take(self) -> list[tuple[str, object]]:
        """Returns the new messages: ids and contents, oldest first; None for one that cannot be read."""
        found: list[tuple[str, object]] = []
        with suppress(OSError):
            numbers = sorted(match[1] for name in os.listdir(self.folder) if (match := _NEW.fullmatch(name)))
            for number in numbers:
                taken = self._place("taken", number)
                os.replace(self._place("new", number), taken)
                found.append((number, _content(taken)))
        return found

    def answer(self, number: str, message: JSONObject) -> None:
        """Answers a message; a sender that waits no longer leaves the file behind."""
        with suppress(OSError):
            write_text(self._place("answer", number), json.dumps(message))

    def close(self) -> None:
        """Takes no further message."""
        with suppress(OSError):
            (self.folder / OPEN_NAME).unlink(missing_ok=True)

    def _clear(self) -> None:
        for kind in ("new", "taken", "answer"):
            for path in self.folder.glob(f"{kind}-*.json"):
                path.unlink(missing_ok=True)

    def _place(self, kind: str, number: str) -> Path:
        return self.folder / f"{kind}-{number}.json"


def _content(path: Path) -> object:
    try:
        content: object = read_json(path, max_bytes=MAX_BYTES)
    except (OSError, ValueError):
        return None
    return content
