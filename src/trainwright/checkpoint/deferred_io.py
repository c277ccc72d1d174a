"""Where the large files of a checkpoint go: to the disk at once, or into a copy that is written later."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from trainwright.checkpoint.host_copy import HostBuffers, NotPlainError
from trainwright.host import available_bytes

logger = logging.getLogger(__name__)

SHARE_OF_MEMORY = 0.5  # of what is available, that a copy may take

Write = Callable[[Any], None]


class CopyRequest(NamedTuple):
    """Memory that a copy takes, and that there is, on a machine; or what stands against a copy."""

    host: str
    lacking_bytes: int
    available_bytes: int
    obstacle: str | None = None


def why_not_copy(wishes: Sequence[CopyRequest]) -> str | None:
    """Why processes write at once rather than copy; they share the memory of a machine. None: they copy."""
    for obstacle in (wish.obstacle for wish in wishes if wish.obstacle is not None):
        return obstacle
    for host in {wish.host: None for wish in wishes}:
        here = [wish for wish in wishes if wish.host == host]
        lacking = sum(wish.lacking_bytes for wish in here)
        if lacking > min(wish.available_bytes for wish in here) * SHARE_OF_MEMORY:
            return f"{lacking:,} bytes of memory are too much to take for a copy"
    return None


class FileSink(Protocol):
    """Where large files go. `put(tree, write)` sees to it that `write` is called with the tensors as they are now.

    `shared`: all processes put something here, and their writing meets, so all write at once or all later.
    """

    def put(self, tree: Any, write: Write, *, shared: bool = False) -> None: ...


class ImmediateSink:
    def put(self, tree: Any, write: Write, *, shared: bool = False) -> None:
        write(tree)


class DeferredSink:
    """Copies now and writes when told to. Where memory is short, or what to copy is not plain, it writes at once.

    Args:
        everybodys: gives one value of each process, by rank.

    Attributes:
        is_shared: something was put off whose writing meets that of other processes.
    """

    def __init__(self, buffers: HostBuffers, everybodys: Callable[[CopyRequest], Sequence[CopyRequest]]) -> None:
        self.is_shared = False
        self._buffers = buffers
        self._everybodys = everybodys
        self._writes: list[tuple[Any, Write]] = []

    def put(self, tree: Any, write: Write, *, shared: bool = False) -> None:
        mine = self._wish(tree)
        reason = why_not_copy(self._everybodys(mine) if shared else [mine])
        if reason is None:
            self._writes.append((self._buffers.copy_of(tree), write))
            self.is_shared = self.is_shared or shared
            return
        logger.info("Training waits while a file of a checkpoint is written: %s.", reason)
        write(tree)

    def _wish(self, tree: Any) -> CopyRequest:
        host = socket.gethostname()
        try:
            return CopyRequest(host, self._buffers.missing_bytes(tree), available_bytes())
        except NotPlainError as error:
            return CopyRequest(host, 0, 0, f"{error} cannot be copied")

    def write(self) -> None:
        for tree, write in self._writes:
            write(tree)
        self._writes.clear()


IMMEDIATE = ImmediateSink()
