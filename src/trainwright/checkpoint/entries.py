"""Entries of a checkpoint: the state that an extension saved under its name, and the file that holds it.

Extensions with `save` and `load` have files of their own, in `FILES`, which keep the names that versions 0.1 and 0.2
gave them. The states of all others are together in one file for each process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainwright._types import (
    AVERAGES_NAME,
    CURRICULUM_NAME,
    DATA_POSITION_NAME,
    EXTENSIONS_NAME,
    GUARD_STATE_NAME,
    ITEMS_NAME,
    LEDGER_NAME,
    RECORDED_METRICS_NAME,
    StateDict,
    parse_json,
)
from trainwright.checkpoint.training_state import load_plain
from trainwright.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20  # of an entry in JSON
FILES = {
    "guard": GUARD_STATE_NAME,
    "recorded_metrics": RECORDED_METRICS_NAME,
    "ledger": LEDGER_NAME,
    "curriculum": CURRICULUM_NAME,
    "checkpoint_items": ITEMS_NAME,
    "data_position": DATA_POSITION_NAME,
    "averages": AVERAGES_NAME,
}


def file_of_entry(name: str) -> str:
    """Returns the name of the file with an entry."""
    return FILES.get(name, EXTENSIONS_NAME)


def accept_any(state: StateDict) -> bool:
    """Returns True."""
    return True


@dataclass(frozen=True, slots=True)
class Entry:
    """State that an extension saved under its name, as one process of a resumed run finds it."""

    name: str
    path: Path | None  # file with the entry; None if the checkpoint has no such file
    is_own: bool  # True if this process wrote the file; False if it is the first process's, or there is none
    read: Callable[[Path], bytes]  # returns the content of a file of the checkpoint

    def state(self, is_sound: Callable[[StateDict], bool] = accept_any) -> StateDict:
        """Returns the saved state, with tensors on the CPU; empty if the checkpoint has none.

        `is_sound` returns whether a run may have written the state; it may raise TypeError, ValueError or
        AttributeError for one of another shape. Raises CheckpointError if the state is not sound, or cannot be read.
        """
        if self.path is None:
            return {}
        state = self._content(self.path)
        with suppress(ValueError, TypeError, AttributeError, KeyError):  # of another shape
            if isinstance(state, dict) and is_sound(state):
                return state
        raise CheckpointError(f"{self.path} holds invalid values. Name another checkpoint, or delete the file.")

    def _content(self, path: Path) -> object:
        if path.suffix == ".json":
            with suppress(ValueError):
                return parse_json(self.read(path))
            return None
        content = load_plain(path)
        if self.name in FILES or not isinstance(content, dict):
            return content
        return content.get(self.name, {})
