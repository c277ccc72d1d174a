"""Outbox of pending uploads: one directory for each, so that the next run finds those of a killed one.

The files are links to those of a checkpoint (copies where links cannot be, and of files that may change), so neither
later saves nor the deletion of old checkpoints alter what will be uploaded. Nothing here knows the network.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainwright._types import read_json, write_text

logger = logging.getLogger(__name__)

OUTBOX_NAME = "_uploads"  # names that begin with an underscore are never uploaded
TICKET_NAME = "upload.json"
FILES_NAME = "files"
PARTIAL = ".partial"
TICKET_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Destination of an upload, and the message of its commit."""

    repo: str | None  # repository; None while its owner's name is not known, since the service was away
    path: str = ""  # directory in the repository; empty: its root
    revision: str | None = None  # branch; None: the main one
    message: str = ""  # of the commit
    step: int = 0  # optimizer step that the files are of

    @property
    def place(self) -> tuple[str | None, str]:
        """Place in the repository: a later upload to the same place makes an earlier one unnecessary."""
        return self.revision, self.path


@dataclass(frozen=True)
class Upload:
    """Directory of files with its ticket."""

    folder: Path
    ticket: Ticket

    @property
    def root(self) -> Path:
        """Directory of the files."""
        return self.folder / FILES_NAME


class Outbox:
    """The uploads that wait in an output directory, oldest first.

    The loop puts them in while the thread that sends takes them out: one lock keeps a look at the directory, and the
    removal of an empty one, from falling between the two.
    """

    def __init__(self, root: str | Path) -> None:
        self.folder = Path(root) / OUTBOX_NAME
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def put(self, ticket: Ticket, *, linked: Mapping[str, Path], copied: Mapping[str, Path] | None = None) -> Upload:
        """Adds an upload, as a whole or not at all: linked files that nobody changes any more, and copied ones."""
        name = f"{time.time_ns():020d}-{next(self._numbers)}"
        partial, final = self.folder / f"{name}{PARTIAL}", self.folder / name
        with self._lock:
            partial.mkdir(parents=True)
        for path, source in {**(copied or {}), **linked}.items():
            target = partial / FILES_NAME / path
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(source, target) if path in linked else shutil.copyfile(source, target)
        write_text(partial / TICKET_NAME, json.dumps(asdict(ticket)))
        partial.rename(final)
        return Upload(final, ticket)

    def waiting(self) -> list[Upload]:
        """Returns the complete pending uploads, without those that a killed process left incomplete."""
        with self._lock:
            return self._read()

    def _read(self) -> list[Upload]:
        found = []
        for folder in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            if folder.name.endswith(PARTIAL):
                continue
            try:
                found.append(Upload(folder, Ticket(**read_json(folder / TICKET_NAME, max_bytes=TICKET_BYTES))))
            except (OSError, ValueError, TypeError) as error:
                logger.warning("%s is no upload that can be read, and is left where it is: %s", folder, error)
        return found

    def remove(self, uploads: Iterable[Upload]) -> None:
        with self._lock:
            for upload in uploads:
                shutil.rmtree(upload.folder, ignore_errors=True)
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def clean(self) -> None:
        """Removes incomplete uploads; only when no other process uses the outbox."""
        for folder in self.folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(folder, ignore_errors=True)
        self.remove(())


def superseded(uploads: Iterable[Upload]) -> list[Upload]:
    """Returns the uploads that a later one to the same place replaces."""
    ordered = list(uploads)
    return [one for i, one in enumerate(ordered) if any(is_over(one, later.ticket) for later in ordered[i + 1 :])]


def is_over(upload: Upload, later: Ticket) -> bool:
    """Returns True if a later upload puts its files where this one would."""
    mine = upload.ticket
    return mine.place == later.place and (mine.repo is None or later.repo is None or mine.repo == later.repo)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
