"""Inbox: small JSON messages to a run, as files in a directory, and the answers to them.

A message is written as `new-<id>.json` by rename. The run takes it by renaming it to `taken-<id>.json`, and answers
with `answer-<id>.json`. So a message can be withdrawn until it is accepted. No link is followed, and what is no file
stays where it is.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path

from trainwright._types import JSONObject
from trainwright.support.door import OwnFolder, RelativeName, parse_json

FOLDER = RelativeName("_control")  # names that begin with an underscore are not uploaded
OPEN_NAME = "open.json"  # there while a run takes messages
MAX_BYTES = 1 << 12
MOST_TAKEN = 64  # messages at a time; the others wait as files
_OURS = re.compile(r"(new|taken|answer)-([0-9a-z-]{1,80})\.json")


class Inbox:
    """Messages to the run that writes into a directory.

    Args:
        run_folder: the directory.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self.folder = Path(run_folder) / FOLDER
        self._run = OwnFolder(run_folder)

    # -- the sender ----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Returns True if a run takes messages, or was killed while it did."""
        return self._run.is_folder(FOLDER) and (self.folder / OPEN_NAME).is_file()

    def send(self, message: JSONObject) -> str:
        """Writes a message; returns its id. Ids sort by time."""
        number = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        self._write(_name("new", number), message)
        return number

    def withdraw(self, number: str) -> bool:
        """Removes a message; returns False if it was taken."""
        withdrawn = _name("withdrawn", number)  # by a rename, which the run or the sender is the one to succeed with
        try:
            self._run.rename(_name("new", number), withdrawn)
        except FileNotFoundError:
            return False
        self._remove(withdrawn)
        return True

    def answer_to(self, number: str) -> JSONObject | None:
        """Returns the answer to a message, and removes it; None if there is none yet."""
        answer = self._content(_name("answer", number))
        if answer is None:
            return None
        for kind in ("answer", "taken"):
            self._remove(_name(kind, number))
        return answer if isinstance(answer, dict) else None

    # -- the receiver --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts accepting messages; messages for an earlier run are removed.

        Raises:
            OSError: the directory of messages cannot be made or written, or is a link.
        """
        self._run.make_folder(FOLDER)
        for name in self._run.names(FOLDER):
            if _OURS.fullmatch(name):
                self._remove(RelativeName(f"{FOLDER}/{name}"))
        self._write(_name(OPEN_NAME), {"pid": os.getpid()})

    def take(self, most: int = MOST_TAKEN) -> list[tuple[str, object]]:
        """Returns new messages, at most so many: ids and contents, oldest first; None for one that cannot be read."""
        found: list[tuple[str, object]] = []
        with suppress(OSError):
            matches = [match for name in self._run.names(FOLDER) if (match := _OURS.fullmatch(name))]
            for number in sorted(match[2] for match in matches if match[1] == "new"):
                if len(found) >= most:
                    break
                taken = _name("taken", number)
                if self._run.is_folder(_name("new", number)):
                    continue
                with suppress(OSError):  # a directory has the other name: the message stays, and can be withdrawn
                    self._run.rename(_name("new", number), taken)
                    found.append((number, self._content(taken)))
        return found

    def answer(self, number: str, message: JSONObject) -> None:
        """Answers a message; a sender that waits no longer leaves the file behind."""
        with suppress(OSError):
            self._write(_name("answer", number), message)

    def close(self) -> None:
        """Takes no further message."""
        self._remove(_name(OPEN_NAME))

    def _remove(self, name: RelativeName) -> None:
        """Removes a file; a directory, which is not ours, stays."""
        with suppress(OSError):
            if not self._run.is_folder(name):
                self._run.remove(name)

    def _write(self, name: RelativeName, message: JSONObject) -> None:
        self._run.put(name, json.dumps(message).encode())

    def _content(self, name: RelativeName) -> object:
        """Returns the value in a file; None if there is none, or it cannot be read."""
        try:
            content: object = parse_json(self._run.read(name, max_bytes=MAX_BYTES))
        except (OSError, ValueError):
            return None
        return content


def _name(kind: str, number: str | None = None) -> RelativeName:
    return RelativeName.parse(f"{FOLDER}/{kind}" if number is None else f"{FOLDER}/{kind}-{number}.json")
