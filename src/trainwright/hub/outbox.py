"""Files for the Hub: which files are uploaded, and the outbox in which they wait, one directory for each upload.

The outbox survives a killed run. Its files are hard links to the files of a checkpoint (copies if links are impossible
or a file may change), so neither later saves nor the deletion of old checkpoints alter an upload. This module does not
use the network.
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
from fnmatch import fnmatch
from pathlib import Path

from trainwright import _types
from trainwright._types import PREFIX_CHECKPOINT_DIR, write_text
from trainwright.config.coerce import output_path
from trainwright.config.protocol import Arguments
from trainwright.support.door import read_json

logger = logging.getLogger(__name__)

OUTBOX_NAME = "_uploads"  # names that begin with an underscore are never uploaded
TICKET_NAME = "upload.json"
FILES_NAME = "files"
PARTIAL = ".partial"
TICKET_BYTES = 1 << 20

# Not uploaded from an output directory: checkpoints, which the strategy handles; the journal, which names paths and
# commits of this machine; incomplete files.
NOT_FROM_ROOT = (
    "_*",
    f"{PREFIX_CHECKPOINT_DIR}-*",
    "journal.jsonl",
    ".*.partial",
    f".{PREFIX_CHECKPOINT_DIR}-*",
    ".lease-*",
    "incidents/*",
    ".git/*",
    ".cache/*",
)
# Not uploaded from a checkpoint: files that only a resume needs.
NOT_OF_THE_MODEL = (
    _types.OPTIMIZER_NAME,
    _types.SCHEDULER_NAME,
    _types.SCALER_NAME,
    _types.TRAINER_STATE_NAME,
    _types.MANIFEST_NAME,
    _types.GUARD_STATE_NAME,
    _types.CURRICULUM_NAME,
    _types.RECORDED_METRICS_NAME,
    _types.LEDGER_NAME,
    _types.AVERAGES_NAME,
    "checkpoint_items*.pt",
    "extension_states*.pt",
    "rng_state*.pth",
    "data_position*.pth",
    "optimizer.bin",
    "optimizer_*/*",
    "pytorch_model_*",
    "global_step*/*",
    "latest",
)


def files_below(folder: Path, *, without: Iterable[str] = ()) -> dict[str, Path]:
    """Relative path -> file, of all that fit no pattern; directories that a pattern covers are not looked into."""
    patterns = tuple(without)
    found = {}
    for place, folders, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        # A pattern that ends in a star covers a directory if it fits its name and a slash: a star fits slashes too.
        folders[:] = [
            name
            for name in folders
            if not any(one.endswith("*") and fnmatch(f"{(below / name).as_posix()}/", one) for one in patterns)
        ]
        for name in names:
            path = Path(place, name)
            relative = (below / name).as_posix()
            if not any(fnmatch(relative, one) for one in patterns) and path.is_file():
                found[relative] = path
    return dict(sorted(found.items()))


def root_files(root: Path) -> dict[str, Path]:
    """Returns the files of an output directory to publish."""
    return files_below(root, without=NOT_FROM_ROOT)


def repo_name(args: Arguments) -> str:
    """Returns the name of the repository: `hub_model_id`, or that of the output directory."""
    return str(args.hub_model_id or Path(output_path(args)).name)


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Destination of an upload, and the message of its commit."""

    repo: str | None  # repository; None while its owner's name is not known, since the service was away
    path: str = ""  # directory in the repository; empty: its root
    revision: str | None = None  # branch; None: the main one
    message: str = ""  # commit message
    step: int = 0  # optimizer step that the files are of


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
        """Adds an upload, as a whole or not at all: links to final files, and copies of others."""
        name = f"{time.time_ns():020d}-{next(self._numbers)}"
        partial = self.folder / f"{name}{PARTIAL}"
        final = self.folder / name
        with self._lock:
            partial.mkdir(parents=True)
        for path, source in {**(copied or {}), **linked}.items():
            target = partial / FILES_NAME / path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                (os.link if path in linked else shutil.copyfile)(source, target)
            except OSError:  # another file system, or a file system without links
                shutil.copyfile(source, target)
        write_text(partial / TICKET_NAME, json.dumps(asdict(ticket)))
        partial.rename(final)
        return Upload(final, ticket)

    def waiting(self) -> list[Upload]:
        """Returns the pending uploads, except incomplete ones left by a killed process."""
        found = []
        with self._lock:
            folders = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
            for folder in (one for one in folders if not one.name.endswith(PARTIAL)):
                try:
                    found.append(Upload(folder, Ticket(**read_json(folder / TICKET_NAME, max_bytes=TICKET_BYTES))))
                except (OSError, ValueError, TypeError) as error:
                    logger.warning("%s cannot be read as an upload and is not touched: %s", folder, error)
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


def is_over(upload: Upload, later: Ticket) -> bool:
    """Returns True if a later upload has the same destination, which makes this one unnecessary."""
    mine = upload.ticket
    is_same_place = (mine.revision, mine.path) == (later.revision, later.path)
    return is_same_place and (mine.repo is None or later.repo is None or mine.repo == later.repo)
