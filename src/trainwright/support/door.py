"""Reads untrusted input: files, listings of stores and messages of other processes.

Input is bounded in size and becomes a value of a narrow type, or a ValueError that says what
is wrong. A name that was read is a path only as a `RelativeName`; an `OwnFolder` opens, writes and removes such names
below a directory of ours, and never follows a link there, not even one that is put in place meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

MAX_DIGITS = 4300  # of an integer, as Python reads and prints it by default
MAX_STEP = 2**53  # exact in every reader of JSON
MAX_NAME = 1024  # characters of a name with its folders
_NOT_IN_NAMES = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, direction of text, halves of characters, line breaks
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


# -- values ------------------------------------------------------------------------------------------------------------


def read_json(path: str | Path, *, max_bytes: int) -> Any:
    """Returns the value in an untrusted JSON file; ValueError as for `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, max_bytes=max_bytes))


def parse_json(content: str | bytes) -> Any:
    """Returns the value of JSON content; ValueError if it is not JSON, nested too deeply, or has endless integers."""
    text = content if isinstance(content, str) else content.decode()
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_bytes(path: str | Path, *, max_bytes: int) -> bytes:
    """Returns the content of an untrusted file; ValueError if it is too large, or a pipe, a device or a directory.

    It does not block on a pipe without a writer, and reads nothing from an endless device.
    """
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > max_bytes:
        raise ValueError(f"it has {status.st_size} bytes, and at most {max_bytes} are read")
    with path.open("rb") as file:
        return file.read(status.st_size)  # not `max_bytes`: that would allocate a buffer of that size


def parse_step(value: object) -> int:
    """Returns a step; ValueError if it is no integer from 0 on."""
    if type(value) is not int or not 0 <= value <= MAX_STEP:
        raise ValueError(f"{_shown(value)} is not a step")
    return value


def parse_number(value: object, *, least: float = -math.inf, most: float = math.inf) -> float:
    """Returns a finite number within these bounds; ValueError for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        found = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        found = math.nan
    if not (math.isfinite(found) and least <= found <= most):
        raise ValueError(f"{_shown(value)} is not a finite number" + _bounds(least, most))
    return found


def _bounds(least: float, most: float) -> str:
    if least == -math.inf and most == math.inf:
        return ""
    return f" from {least:g} on" if most == math.inf else f" from {least:g} to {most:g}"


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**MAX_DIGITS else "a number of many digits"
    return text if len(text) <= 80 else text[:77] + "..."


class RelativeName(str):
    """A name below a directory, with folders separated by "/".

    No part is empty, "." or ".."; it is not absolute, has no backslash, no control character and no drive of Windows.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, value: object, *, parts: int | None = None) -> RelativeName:
        """Returns the name in a value that was read; ValueError if it is none, or has more than so many parts."""
        if not isinstance(value, str):
            raise ValueError(f"{_shown(value)} is not a name")
        found = value.split("/")
        if (
            not 0 < len(value) <= MAX_NAME
            or any(part in ("", ".", "..") for part in found)
            or "\\" in value
            or ":" in found[0]
            or any(unicodedata.category(letter) in _NOT_IN_NAMES for letter in value)
            or (parts is not None and len(found) > parts)
        ):
            raise ValueError(f"{_shown(value)} is not a name below a directory")
        return cls(value)


# -- files -------------------------------------------------------------------------------------------------------------


class OwnFolder:
    """A directory of this library, in which others may have placed files and links.

    The directory itself may be reached by links, which are the user's; nothing below it is. Each method raises OSError
    (ELOOP, ENOTDIR) where a part of a name is a link, and whatever the system raises.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def path(self, name: RelativeName) -> Path:
        """Returns the path of a name; for messages, and for functions that check the file themselves."""
        return self.root / name

    @contextmanager
    def _parent(self, name: RelativeName, *, makes: bool = False) -> Iterator[tuple[int, str]]:
        """Yields a descriptor of the folder that a name is in, and its last part."""
        *folders, last = name.split("/")
        opened = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                if makes:
                    with suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=opened)
                inner = os.open(folder, _FOLDER, dir_fd=opened)
                os.close(opened)
                opened = inner
            yield opened, last
        finally:
            os.close(opened)

    def open(self, name: RelativeName, mode: str = "rb") -> IO[bytes]:
        """Opens a regular file: "rb", "wb" (new, or emptied), "xb" (new) or "ab"; folders are made to write.

        Raises:
            ValueError: it is a pipe, a device or a directory.
        """
        flags = {
            "rb": os.O_RDONLY,
            "wb": os.O_WRONLY | os.O_CREAT,
            "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
            "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        }[mode]
        with self._parent(name, makes=mode != "rb") as (folder, last):
            found = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
        try:
            status = os.fstat(found)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{name} is not a regular file")
            if mode == "wb":
                os.ftruncate(found, 0)
            return os.fdopen(found, mode.replace("x", "w"))
        except BaseException:
            os.close(found)
            raise

    def remove(self, name: RelativeName) -> None:
        """Removes a file, a link itself, or a directory with its content; does nothing if the name is missing."""
        with suppress(FileNotFoundError), self._parent(name) as (folder, last):
            if stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(last, dir_fd=folder)
            else:
                os.unlink(last, dir_fd=folder)

    def make_folder(self, name: RelativeName) -> Path:
        """Makes a folder if there is none, and returns its path."""
        with self._parent(name, makes=True) as (folder, last):
            with suppress(FileExistsError):
                os.mkdir(last, dir_fd=folder)
            os.close(os.open(last, _FOLDER, dir_fd=folder))
        return self.path(name)

    def names(self) -> list[RelativeName]:
        """Returns the names of its entries that are neither links nor of a form that no program of ours writes."""
        found = []
        with suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                with suppress(ValueError):
                    if not entry.is_symlink():
                        found.append(RelativeName.parse(entry.name))
        return sorted(found)

    def is_folder(self, name: RelativeName) -> bool:
        """Returns whether a name is a directory here, and no part of it a link."""
        try:
            with self._parent(name) as (folder, last):
                return stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            return False
