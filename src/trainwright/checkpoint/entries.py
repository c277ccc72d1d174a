"""Entries of a checkpoint: the state that an extension saved under its name, and its file.

Extensions with `save` and `load` have their own files, which the table of capabilities names; those of versions 0.1 and
0.2 have the same names. The states of all others are stored together in one file per process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainwright._types import DATA_POSITION_NAME, EXTENSIONS_NAME, StateDict
from trainwright.capability_table import FILES as FILES_OF_CAPABILITIES
from trainwright.checkpoint.training_state import load_plain
from trainwright.errors import CheckpointError
from trainwright.support.door import MALFORMED, parse_json

MAX_JSON_BYTES = 64 << 20  # for an entry in JSON
FILES = {"data_position": DATA_POSITION_NAME, **FILES_OF_CAPABILITIES}


def name_entry_file(name: str) -> str:
    """Returns the name of the file with an entry."""
    return FILES.get(name, EXTENSIONS_NAME)


def accept_any(state: StateDict) -> bool:
    """Returns True."""
    return True


@dataclass(frozen=True, slots=True)
class Entry:
    """Saved state of an extension, as one process of a resumed run finds it."""

    name: str
    path: Path | None  # file with the entry; None if the checkpoint has no such file
    is_own: bool  # whether this process wrote the file; False if the first process did, or there is none
    read: Callable[[Path], bytes]  # returns the content of a file of the checkpoint

    def state(self, is_sound: Callable[[StateDict], bool] = accept_any) -> StateDict:
        """Returns the saved state, with tensors on the CPU; empty if the checkpoint has none.

        `is_sound` returns whether a run may have written the state; for an unexpected structure, it may raise
        TypeError, ValueError or AttributeError. Raises CheckpointError if the state is invalid or cannot be read.
        """
        if self.path is None:
            return {}
        state = self._content(self.path)
        with suppress(*MALFORMED):
            if isinstance(state, dict) and is_sound(state):
                return state
        raise CheckpointError(f"{self.path} holds invalid values. Use another checkpoint, or delete the file.")

    def _content(self, path: Path) -> object:
        if path.suffix == ".json":
            with suppress(ValueError):
                return parse_json(self.read(path))
            return None
        content = load_plain(path)
        if self.name in FILES or not isinstance(content, dict):
            return content
        return content.get(self.name, {})
