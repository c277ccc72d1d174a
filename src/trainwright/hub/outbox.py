"""Files for the Hub: which files are uploaded, and the outbox in which they wait, one directory for each upload.

The outbox survives a killed run. Its files are hard links to the files of a checkpoint (copies if links are impossible
or a file may change), so neither later saves nor the deletion of old checkpoints alter an upload. This module does not
use the network.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from trainwright import _types
from trainwright._types import PREFIX_CHECKPOINT_DIR
from trainwright.capability_table import FILES, LOCAL_FILES
from trainwright.config.coerce import output_path
from trainwright.config.protocol import Arguments
from trainwright.support.door import OwnFolder, RelativeName, parse_json, parse_step

logger = logging.getLogger(__name__)

OUTBOX_NAME = "_uploads"  # names that begin with an underscore are never uploaded
TICKET_NAME = "upload.json"
FILES_NAME = "files"
PARTIAL = ".partial"
TICKET_BYTES = 1 << 20
MOST_NAMED = 5  # files in a message

# Not uploaded from an output directory: checkpoints, which the strategy handles; the journal, which names paths and
# commits of this machine; incomplete files.
NOT_FROM_ROOT = (
    "_*",
    f"{PREFIX_CHECKPOINT_DIR}-*",
    "journal.jsonl",
    ".*.partial",
    f".{PREFIX_CHECKPOINT_DIR}-*",
    *LOCAL_FILES,
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
    *FILES.values(),
    *(f"{Path(name).stem}_*{Path(name).suffix}" for name in FILES.values()),  # of one process
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
    left = [name for name, path in found.items() if _leaves(path, folder)]
    if left:
        logger.warning(
            "%s: links that leave the directory are not uploaded: %s. Copy what they name to upload it.",
            folder,
            ", ".join(sorted(left)[:MOST_NAMED]),
        )
    return {name: path for name, path in sorted(found.items()) if name not in left}


def links_out(root: Path) -> list[str]:
    """Returns the files of an output directory that are links out of it: another user may have placed them."""
    paths = (Path(place, name) for place, _, names in os.walk(root) for name in names)
    return sorted(path.relative_to(root).as_posix() for path in paths if _leaves(path, root))


def _leaves(path: Path, folder: Path) -> bool:
    """Returns whether a file is a link to one outside of a directory."""
    return path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())


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

    @classmethod
    def parse(cls, values: object) -> Ticket:
        """Returns the ticket in a file, which others may have written; ValueError or TypeError for another form."""
        ticket = cls(**values) if isinstance(values, dict) else None
        if ticket is None or not all(isinstance(one, str) for one in (ticket.path, ticket.message)):
            raise ValueError("it has the form of something else")
        if not all(one is None or isinstance(one, str) for one in (ticket.repo, ticket.revision)):
            raise ValueError("its repository or its branch has no valid name")
        if ticket.path:
            RelativeName.parse(ticket.path)
        parse_step(ticket.step)
        return ticket


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
        self._root = OwnFolder(root)
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def put(self, ticket: Ticket, *, linked: Mapping[str, Path], copied: Mapping[str, Path] | None = None) -> Upload:
        """Adds an upload, as a whole or not at all: links to final files, and copies of others.

        Raises:
            OSError: the outbox is a link, or cannot be written to.
        """
        name = f"{time.time_ns():020d}-{next(self._numbers)}"
        partial = f"{name}{PARTIAL}"
        with self._lock:
            self._root.root.mkdir(parents=True, exist_ok=True)
            self._root.make_folder(_name(partial, FILES_NAME))
        for path, source in {**(copied or {}), **linked}.items():
            self._root.take_in(source, _name(partial, FILES_NAME, path), links=path in linked)
        self._root.put(_name(partial, TICKET_NAME), json.dumps(asdict(ticket)).encode())
        self._root.rename(_name(partial), _name(name))
        return Upload(self.folder / name, ticket)

    def waiting(self) -> list[Upload]:
        """Returns the pending uploads, except incomplete ones left by a killed process, and ones with links."""
        found = []
        with self._lock:
            for name in self._names():
                if name.endswith(PARTIAL):
                    continue
                try:
                    found.append(Upload(self.folder / name, self._read(name)))
                except (OSError, ValueError, TypeError) as error:
                    logger.warning("%s cannot be read as an upload and is not touched: %s", self.folder / name, error)
        return found

    def size(self) -> int:
        """Returns the bytes of all files in the outbox; those that are sent and removed meanwhile may be missing."""
        size = 0
        for place, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(place, name)).st_size
        return size

    def _read(self, name: RelativeName) -> Ticket:
        """Returns the ticket of an upload; OSError if it is, or has, a link: its target would be published."""
        ticket = Ticket.parse(parse_json(self._root.read(_name(name, TICKET_NAME), max_bytes=TICKET_BYTES)))
        for place, folders, files in os.walk(self.folder / name):
            for one in (*folders, *files):
                if Path(place, one).is_symlink():
                    raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(Path(place, one)))
        return ticket

    def _names(self) -> list[RelativeName]:
        """Returns the names in the outbox; none if that is a link, which is said."""
        try:
            return self._root.names(_name())
        except FileNotFoundError:
            return []
        except OSError as error:
            logger.warning("%s is not read: %s", self.folder, error)
            return []

    def remove(self, uploads: Iterable[Upload]) -> None:
        with self._lock:
            for upload in uploads:
                self._remove(upload.folder.name)
            with suppress(OSError):  # it is not empty, or there is none
                self.folder.rmdir()

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            self._root.remove(_name(name))

    def clean(self) -> None:
        """Removes incomplete uploads; only when no other process uses the outbox."""
        for name in self._names():
            if name.endswith(PARTIAL):
                self._remove(name)
        self.remove(())


def _name(*parts: str) -> RelativeName:
    """Returns a name in the outbox, below the output directory."""
    return RelativeName.parse("/".join((OUTBOX_NAME, *parts)))


def is_over(upload: Upload, later: Ticket) -> bool:
    """Returns True if a later upload has the same destination, which makes this one unnecessary."""
    mine = upload.ticket
    is_same_place = (mine.revision, mine.path) == (later.revision, later.path)
    return is_same_place and (mine.repo is None or later.repo is None or mine.repo == later.repo)
