"""The lease of a run as an extension: taken before anything is written, confirmed before each save."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.capabilities.lease.lease import Lease, take
from trainwright.loop.extension import Extension, Run


class DirectoryLease(Extension):
    """Only one live run saves into a directory.

    Args:
        folder: the directory.
        agree: calls a function in the main process and returns its result in all of them.
        may_save: the run may save there; otherwise the lease is only taken if a callback asks for a save.
        wait_s: how long to wait for another run that has the directory, in seconds.
    """

    name = "lease"
    order = -100

    def __init__(
        self, folder: str, agree: Callable[[Callable[[], bool]], bool], *, may_save: bool, wait_s: float
    ) -> None:
        self._lease = Lease(folder)
        self._folder = folder
        self._agree = agree
        self._may_save = may_save
        self._wait_s = wait_s

    def open(self, run: Run) -> None:
        """Takes the lease; ArgumentError if another live run holds it. All processes must call it."""
        if self._may_save:
            take(self._lease, self._agree, folder=self._folder, wait_s=self._wait_s)

    def check_save(self) -> None:
        """Raises CheckpointWriteError if another run now has the directory."""
        self._lease.confirm()

    def close(self) -> None:
        """Releases the directory."""
        self._lease.release()
