"""The log history as JSON text, kept from save to save, so that a save serialises only what is new."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import is_
from typing import Any

NUM_RECENT = 100  # the newest entries, which callbacks still change, are serialised anew each time


class HistoryText:
    """A JSON array with one entry a line.

    Entries that are removed, replaced, or given more or fewer values are noticed wherever they are; another value
    under a name that was there is noticed among the newest `NUM_RECENT`.
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []  # those whose text is kept
        self._sizes: list[int] = []  # how many values each had
        self._texts: list[str] = []  # of several entries each

    def of(self, history: Sequence[dict[str, Any]]) -> str:
        if not self._still_begins(history):
            self._entries, self._sizes, self._texts = [], [], []
        settled = history[len(self._entries) : max(len(history) - NUM_RECENT, 0)]
        if settled:
            self._entries += settled
            self._sizes += map(len, settled)
            self._texts.append(_lines(settled))
        recent = history[len(self._entries) :]
        lines = [*self._texts, _lines(recent)] if recent else self._texts
        return "[\n" + ",\n".join(lines) + "\n  ]" if lines else "[]"

    def _still_begins(self, history: Sequence[dict[str, Any]]) -> bool:
        if len(self._entries) > len(history) or not all(map(is_, self._entries, history)):
            return False
        return list(map(len, self._entries)) == self._sizes


def _lines(entries: Sequence[dict[str, Any]]) -> str:
    return ",\n".join("    " + json.dumps(entry, sort_keys=True) for entry in entries)
