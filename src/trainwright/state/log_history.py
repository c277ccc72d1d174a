"""Log history as JSON text, cached from save to save, so that a save serializes only new entries."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

from trainwright._types import recordable

logger = logging.getLogger(__name__)

NUM_RECENT = 100  # the newest entries, which callbacks may still change, are serialized each time
NUM_IN_PIECE = 4000  # entries: some hundred kilobytes, which are written without being copied together first


class HistoryText:
    """A JSON array with one entry a line.

    Entries that are removed, replaced, or given more or fewer values are noticed wherever they are; another value
    under a name that was there is noticed among the newest `NUM_RECENT`.
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []  # those whose text is cached
        self._sizes: list[int] = []  # how many values each had
        self._pieces: list[bytes] = []  # their text, with a comma after each

    def pieces(self, history: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        """Serializes a history.

        Args:
            history: all entries; those of the last call are not serialized again.

        Yields:
            The text in pieces, in UTF-8.
        """
        if not self._still_begins(history):
            self._entries, self._sizes, self._pieces = [], [], []
        settled = max(len(history) - NUM_RECENT, 0)
        for first in range(len(self._entries), settled, NUM_IN_PIECE):
            entries = history[first : min(first + NUM_IN_PIECE, settled)]
            self._entries += entries
            self._sizes += map(len, entries)
            self._pieces.append(b"".join(_line(entry) + b",\n" for entry in entries))
        recent = history[len(self._entries) :]
        if not recent:  # nothing is settled without something recent after it
            yield b"[]"
            return
        yield b"[\n"
        yield from self._pieces
        yield b",\n".join(map(_line, recent)) + b"\n  ]"

    def _still_begins(self, history: Sequence[dict[str, Any]]) -> bool:
        if len(self._entries) >= max(len(history), 1) or not all(map(is_, self._entries, history)):
            return False
        return list(map(len, self._entries)) == self._sizes


def _line(entry: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(entry, sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # an entry that did not come through `Trainer.log`
        dropped: dict[str, str] = {}
        text = json.dumps(recordable(entry, dropped), sort_keys=True)
        logger.warning("trainer_state.json is written without %s of log_history.", dropped)
    return f"    {text}".encode()
