"""Where the large files of a checkpoint go: to the disk at once, or into a copy that is written later."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from trainwright.checkpoint.snapshot import Buffers, NotPlainError, available_bytes

logger = logging.getLogger(__name__)

SHARE_OF_MEMORY = 0.5  # of what is available, that a copy may take

Write = Callable[[Any], None]


class Sink(Protocol):
    """Where large files go. `put(tree, write)` sees to it that `write` is called with the tensors as they are now."""

    def put(self, tree: Any, write: Write) -> None: ...


class AtOnce:
    def put(self, tree: Any, write: Write) -> None:
        write(tree)


class Later:
    """Copies now and writes when told to. Where memory is short, or what to copy is not plain, it writes at once."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._writes: list[tuple[Any, Write]] = []

    def put(self, tree: Any, write: Write) -> None:
        try:
            lacking = self._buffers.missing_bytes(tree)
            if lacking <= available_bytes() * SHARE_OF_MEMORY:
                return self._writes.append((self._buffers.copy_of(tree), write))
            reason = f"{lacking:,} bytes of memory are too much to take for a copy"
        except NotPlainError as error:
            reason = f"{error} cannot be copied"
        logger.info("Training waits while a file of a checkpoint is written: %s.", reason)
        write(tree)

    def write(self) -> None:
        for tree, write in self._writes:
            write(tree)
        self._writes.clear()


AT_ONCE = AtOnce()
