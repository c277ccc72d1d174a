"""A directory as a store: those calls of an fsspec client that `remote` makes, which follow no link in the directory.

The client of fsspec follows them, and in a shared directory others may have put them there: an upload would write into
their target, and a deletion would empty it. What has the name of a file that is written is replaced, never opened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from trainwright.support.door import OwnFolder, RelativeName


class DirectoryClient:
    """Client of one directory, which may itself be reached by links: these are the user's.

    Args:
        root: the directory, with which the paths of all calls begin.
    """

    protocol = "file"

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder = OwnFolder(root)

    @contextmanager
    def _name(self, path: str) -> Iterator[RelativeName]:
        """Yields the name in a path; a link on the way there is an error that says so."""
        name = RelativeName.parse(path.removeprefix(self._root).strip("/"))
        try:
            yield name
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            text = "a part of it is a link or a file, and copies follow no link; remove it"
            raise OSError(error.errno, text, path) from None

    def ls(self, path: str, *, detail: bool) -> list[str]:
        """Returns the paths of the entries of the directory, without links."""
        if not Path(self._root).is_dir():
            raise FileNotFoundError(self._root)
        return [f"{self._root}/{name}" for name in self._folder.names()]

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, int]]:
        """Returns the sizes of the regular files below a path."""
        if path.rstrip("/") == self._root:
            found = self._folder.files()
        else:
            with self._name(path) as name:
                found = self._folder.files(name)
        return {f"{path.rstrip('/')}/{one}": {"size": size} for one, size in found.items()}

    def info(self, path: str) -> dict[str, Any]:
        """Returns size and time of a file."""
        with self._name(path) as name, self._folder.open(name) as file:
            status = os.fstat(file.fileno())
        return {"size": status.st_size, "mtime": status.st_mtime}

    def modified(self, path: str) -> datetime:
        """Returns when a file was written."""
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    def cat_file(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns the bytes of a file from a start to before an end."""
        with self._name(path) as name, self._folder.open(name) as file:
            file.seek(start)
            return file.read() if end is None else file.read(end - start)

    def pipe_file(self, path: str, content: bytes, mode: str = "overwrite") -> None:
        """Writes a small file at once; FileExistsError if it shall be created, and there is one."""
        self._make_root()
        with self._name(path) as name:
            self._folder.put(name, content, is_new=mode == "create")

    def open(self, path: str, mode: str, *, block_size: int) -> IO[bytes]:
        """Opens a new file to write, in the place of what has its name."""
        assert mode == "wb"
        self._make_root()
        with self._name(path) as name:
            with suppress(FileNotFoundError):
                self._folder.unlink(name)
            return self._folder.open(name, "xb")

    def rm_file(self, path: str) -> None:
        """Removes a file or a link."""
        with self._name(path) as name:
            self._folder.unlink(name)

    def rmdir(self, path: str) -> None:
        """Removes a directory, and those in it, if there is no file."""
        with self._name(path) as name:
            self._folder.remove_empty(name)

    def invalidate_cache(self, path: str) -> None:
        """Does nothing: the directory is read at each call."""

    def _make_root(self) -> None:
        Path(self._root).mkdir(parents=True, exist_ok=True)
