"""Sinks of a checkpoint's large files: written at once, or copied and written later."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from trainwright._types import Nested
from trainwright.checkpoint.host_copy import HostBuffers, NotPlainError
from trainwright.host import available_bytes

logger = logging.getLogger(__name__)

SHARE_OF_MEMORY = 0.5  # of what is available, that a copy may take

Write = Callable[[Nested], None]


class CopyRequest(NamedTuple):
    """Memory that a copy needs and that a machine has, in bytes; or the reason against a copy."""

    host: str
    lacking_bytes: int
    available_bytes: int
    obstacle: str | None = None


def why_not_copy(wishes: Sequence[CopyRequest]) -> str | None:
    """Returns the reason why processes write at once, or None if they copy; those of one host share its memory."""
    for obstacle in (wish.obstacle for wish in wishes if wish.obstacle is not None):
        return obstacle
    for host in {wish.host: None for wish in wishes}:
        here = [wish for wish in wishes if wish.host == host]
        lacking = sum(wish.lacking_bytes for wish in here)
        if lacking > min(wish.available_bytes for wish in here) * SHARE_OF_MEMORY:
            return f"{lacking:,} bytes of memory are too much to take for a copy"
    return None


class FileSink(Protocol):
    """Destination of large files."""

    def put(self, tree: Nested, write: Write, *, shared: bool = False) -> None:
        """Calls `write`, now or later, with the present values of nested tensors; `shared`: all processes do alike."""
        ...


class ImmediateSink:
    """Sink that writes at once."""

    def put(self, tree: Nested, write: Write, *, shared: bool = False) -> None:
        """Writes the tree."""
        write(tree)


class DeferredSink:
    """Sink that copies at once and writes in `write`. Where memory or tensors allow no copy, it writes at once.

    `everybodys` collects one value of each process, by rank; `is_shared` tells whether a pending write is collective.
    """

    def __init__(self, buffers: HostBuffers, everybodys: Callable[[CopyRequest], Sequence[CopyRequest]]) -> None:
        self.is_shared = False
        self._buffers = buffers
        self._everybodys = everybodys
        self._writes: list[tuple[Nested, Write]] = []

    def put(self, tree: Nested, write: Write, *, shared: bool = False) -> None:
        """Copies the tree, or writes it at once where it cannot."""
        mine = self._wish(tree)
        wishes = self._everybodys(mine) if shared else [mine]
        reason = why_not_copy(wishes)
        if reason is None:
            copied, mine = self._copy(tree, mine)
            wishes = self._everybodys(mine) if shared else [mine]
            reason = why_not_copy(wishes)
            if reason is None:
                self._writes.append((copied, write))
                self.is_shared = self.is_shared or shared
                return
        level = logging.INFO if any(wish.obstacle for wish in wishes) else logging.WARNING
        logger.log(level, "Training waits while a file of a checkpoint is written: %s.", reason)
        write(tree)

    def _copy(self, tree: Nested, wish: CopyRequest) -> tuple[Nested, CopyRequest]:
        """Copies a tree; where its memory cannot be had after all, the request returned has none available."""
        try:
            return self._buffers.copy_of(tree), wish
        except (MemoryError, OSError, RuntimeError) as error:  # of python, of mmap, of torch's allocators
            logger.warning("A checkpoint could not be copied in memory: %s", error or type(error).__name__)
            return None, wish._replace(lacking_bytes=max(1, wish.lacking_bytes), available_bytes=0)

    def _wish(self, tree: Nested) -> CopyRequest:
        host = socket.gethostname()
        try:
            return CopyRequest(host, self._buffers.missing_bytes(tree), available_bytes())
        except NotPlainError as error:
            return CopyRequest(host, 0, 0, f"{error} cannot be copied")

    def write(self) -> None:
        """Writes all copies."""
        for tree, write in self._writes:
            write(tree)
        self._writes.clear()


IMMEDIATE = ImmediateSink()
