"""Outbox: the checkpoints of a run that wait for their copy, as directories of links to their files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from trainwright._types import MANIFEST_NAME
from trainwright.capabilities.mirror.parts import PREFIX
from trainwright.capabilities.mirror.remote import Copy
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest
from trainwright.errors import CheckpointError
from trainwright.support.door import OwnFolder, RelativeName

PARTIAL = ".partial"


class Outbox:
    """Checkpoints that wait for their copy to a URL.

    The run adds them and a thread removes them.

    Args:
        folder: the run's directory, in which the outbox lies.
        url: the URL.

    Attributes:
        path: its directory.
        files: the run's directory, for changes by name.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.path = outbox_path(folder, url)
        self.files = OwnFolder(folder)
        self._lock = threading.Lock()

    def clear(self, *, keeps_checkpoints: bool) -> None:
        """Removes what an earlier training left, but for whole checkpoints if it `keeps_checkpoints`."""
        for name in self._names():
            if not keeps_checkpoints or name.endswith(PARTIAL) or name.startswith(PREFIX):
                self.remove(name)

    def add(self, checkpoint: Path, manifest: Manifest) -> None:
        """Adds links to the files of a checkpoint, in place of one of the same step.

        Raises:
            OSError: links cannot be made.
            ValueError: a name in the manifest leads out of the checkpoint.
        """
        target = self.path / checkpoint.name
        if self.is_current(target, manifest):
            return
        partial = f"{target.name}{PARTIAL}"
        self.remove(partial)
        for name in (*manifest.files, MANIFEST_NAME):
            self.files.take_in(checkpoint / RelativeName.parse(name), self._name(partial, name), links=True)
        with self._lock:
            self.remove(target.name)
            self.files.rename(self._name(partial), self._name(target.name))

    def is_current(self, folder: Path, manifest: Manifest) -> bool:
        """Returns True if a directory of the outbox has the checkpoint of a manifest."""
        there = Manifest.read(folder)
        return there is not None and there.identity == manifest.identity

    def waiting(self) -> Iterator[tuple[Path, Manifest]]:
        """Yields the checkpoints, the newest first."""
        paths = [self.path / name for name in self._names()]
        found = [(path, Manifest.read(path)) for path in paths if Copy.parse(path.name) is not None]
        yield from sorted(((p, m) for p, m in found if m is not None), key=lambda one: one[1].step, reverse=True)

    def take_newest(self, kept: set[int]) -> tuple[Path, Manifest] | None:
        """Returns the newest checkpoint, and removes those that it replaces: neither the best nor a step in `kept`."""
        with self._lock:
            waiting = list(self.waiting())
            if not waiting:
                return None
            newest, _ = waiting[0]
            best = best_step(newest)
            for path, manifest in waiting[1:]:
                if manifest.step != best and manifest.step not in kept:
                    self.remove(path.name)
            return waiting[0]

    def remove_sent(self, folder: Path, manifest: Manifest) -> None:
        """Removes a checkpoint that was sent, unless another one of its step came meanwhile."""
        with self._lock:
            if self.is_current(folder, manifest):
                self.remove(folder.name)

    def remove(self, name: str) -> None:
        """Removes what has a name in the outbox, as far as that can be removed."""
        with suppress(OSError):
            self.files.remove(self._name(name))

    def remove_if_empty(self) -> None:
        """Removes the directory, unless something is in it."""
        with suppress(OSError):
            self.path.rmdir()

    def _name(self, *parts: str) -> RelativeName:
        """Returns a name in the outbox, below the run's directory."""
        return RelativeName.parse("/".join((self.path.name, *parts)))

    def _names(self) -> list[RelativeName]:
        """Returns the names in the outbox; none if that is a link, which is not followed."""
        try:
            return self.files.names(self._name())
        except OSError:
            return []


def outbox_path(folder: Path, url: str) -> Path:
    """Returns the directory in which the checkpoints of a run wait for their copy to a URL."""
    return folder / f"_mirror-{xxhash.xxh3_64(url.encode()).hexdigest()[:8]}"


def best_step(checkpoint: Path) -> int | None:
    """Returns the step of the best checkpoint, as a checkpoint records it; None without one."""
    try:
        return Checkpoint(checkpoint).state.best_global_step
    except CheckpointError:
        return None
