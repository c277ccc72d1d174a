"""Reads untrusted input: files, listings of stores and messages of other processes.

Input is bounded in size and becomes a value of a narrow type, or a ValueError that says what
is wrong. A name that was read is a path only as a `RelativeName`; an `OwnFolder` opens, writes and removes such names
below a directory of ours, and never follows a link there, not even one that is put in place meanwhile.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

MAX_SETTINGS = 1 << 24  # bytes of a file that a person writes, or that is a page at most
MAX_DIGITS = 4300  # of an integer, as Python reads and prints it by default: a log may hold such a one
MAX_DEPTH = 100  # of values within each other
MAX_STEP = 2**53  # exact in every reader of JSON
IS_LINK = "it is a symbolic link, which is not followed; delete it"
COPY_BYTES = 1 << 20  # read and written at once
MAX_NAME = 1024  # characters of a name with its folders
NOT_SHOWN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories: control, direction of text, halves of characters, line breaks
# What reading a value of an unexpected structure may raise, tensors and numbers included.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


# -- values ------------------------------------------------------------------------------------------------------------


def read_json(path: str | os.PathLike[str], *, max_bytes: int) -> Any:
    """Returns the value in an untrusted JSON file; ValueError as for `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, max_bytes=max_bytes))


def parse_json(content: str | bytes, *, max_digits: int = MAX_DIGITS) -> Any:
    """Returns the value of JSON content; ValueError if it is not JSON, nested too deeply, or has endless numbers."""
    text = content if isinstance(content, str) else content.decode()

    def integer(digits: str) -> int:
        if len(digits) > max_digits:
            raise ValueError(f"it has a number of {len(digits)} digits, and at most {max_digits} are read")
        return int(digits)

    try:
        value = json.loads(text, parse_int=integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError("it is nested too deeply")
    return value


def _is_deep(value: Any) -> bool:
    """Returns whether values are within each other beyond the limit, at which functions that call themselves fail."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [one for several in inner for one in several if isinstance(one, (dict, list))]
        if not level:
            return False
    return True


def has_halves(value: Any) -> bool:
    """Returns whether a text in a value of JSON has half of a character (one of two surrogates)."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def without_halves(value: Any) -> Any:
    """Returns a value of JSON with a question mark in place of each half of a character."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace")) if has_halves(value) else value


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
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


def read_settings(path: str | os.PathLike[str]) -> str:
    """Returns the text of a file that a person writes; ValueError with its name as for `read_bytes`, or for no text."""
    try:
        text = read_bytes(path, max_bytes=MAX_SETTINGS).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} cannot be read: {error}. Name another file.") from error
    # as a file that is opened as text
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_step(value: object) -> int:
    """Returns a step; ValueError if it is no integer from 0 on."""
    if type(value) is not int or not 0 <= value <= MAX_STEP:
        raise ValueError(f"{shown(value)} is not a step")
    return value


def parse_number(value: object, *, least: float = -math.inf, most: float = math.inf) -> float:
    """Returns a finite number within these bounds; ValueError for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        found = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        found = math.nan
    if not (math.isfinite(found) and least <= found <= most):
        raise ValueError(f"{shown(value)} is not a finite number" + _bounds(least, most))
    return found


def _bounds(least: float, most: float) -> str:
    if least == -math.inf and most == math.inf:
        return ""
    return f" from {least:g} on" if most == math.inf else f" from {least:g} to {most:g}"


def shown(value: object) -> str:
    """Returns a value that was read as short text, for messages."""
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
            raise ValueError(f"{shown(value)} is not a name")
        found = value.split("/")
        if (
            not 0 < len(value) <= MAX_NAME
            or any(part in ("", ".", "..") for part in found)
            or "\\" in value
            or ":" in found[0]
            or any(unicodedata.category(letter) in NOT_SHOWN for letter in value)
            or (parts is not None and len(found) > parts)
        ):
            raise ValueError(f"{shown(value)} is not a name below a directory")
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
                inner = _open_folder(folder, opened)
                os.close(opened)
                opened = inner
            yield opened, last
        finally:
            os.close(opened)

    def open(self, name: RelativeName, mode: str = "rb", *, makes: bool = True) -> IO[bytes]:
        """Opens a regular file: "rb", "wb" (new, or emptied), "xb" (new) or "ab"; `makes` its folders to write.

        Raises:
            ValueError: it is a pipe, a device or a directory.
        """
        flags = {
            "rb": os.O_RDONLY,
            "wb": os.O_WRONLY | os.O_CREAT,
            "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
            "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        }[mode]
        with self._parent(name, makes=makes and mode != "rb") as (folder, last):
            return self._opened(last, flags, folder)

    def _opened(self, last: str, flags: int, folder: int) -> IO[bytes]:
        """Opens a regular file in an open folder."""
        try:
            found = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, IS_LINK, last) from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise ValueError(f"{last} is not a regular file")
            mode = "rb"
            if flags & os.O_APPEND:
                mode = "ab"
            elif flags & os.O_WRONLY:
                mode = "wb"
                os.ftruncate(found, 0)
            return os.fdopen(found, mode)
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

    def unlink(self, name: RelativeName) -> None:
        """Removes a file, or a link (not what it names); OSError for a directory, and where there is nothing."""
        with self._parent(name) as (folder, last):
            os.unlink(last, dir_fd=folder)

    def put(self, name: RelativeName, content: bytes, *, is_new: bool = False) -> None:
        """Writes a small file at once, in the place of what has its name: a link is replaced, not followed.

        Raises:
            FileExistsError: it shall be new, and there is something of that name.
        """
        with self.replacing(name, is_new=is_new) as file:
            file.write(content)

    @contextmanager
    def replacing(self, name: RelativeName, *, is_new: bool = False) -> Iterator[IO[bytes]]:
        """Yields a file that takes a name once it is written, as `put` does; after an error nothing is left of it."""
        with self._parent(name, makes=True) as (folder, last):
            draft = f".{last}.{os.getpid()}.{secrets.token_hex(4)}.partial"
            try:
                with self._opened(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder) as file:
                    yield file
                if is_new:
                    _give_name(draft, last, folder)
                else:
                    os.replace(draft, last, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=folder)

    def take_in(self, source: Path, name: RelativeName, *, links: bool = False) -> None:
        """Gives a file a new name here too, by a hard link if that is asked for and possible; else it is copied."""
        with self._parent(name, makes=True) as (folder, last), suppress(OSError):
            if links:
                os.link(source, last, dst_dir_fd=folder)
                return
        with source.open("rb") as content, self.open(name, "xb") as file:
            shutil.copyfileobj(content, file, COPY_BYTES)

    def remove_empty(self, name: RelativeName) -> None:
        """Removes the folders in a folder, and that itself, that have no file; nothing that others keep there."""
        with suppress(OSError), self._parent(name) as (folder, last):
            for _, inner, _, opened in os.fwalk(last, topdown=False, dir_fd=folder):
                for one in inner:
                    with suppress(OSError):
                        os.rmdir(one, dir_fd=opened)
            os.rmdir(last, dir_fd=folder)

    def files(self, name: RelativeName | None = None) -> dict[RelativeName, int]:
        """Returns the sizes of the regular files below a folder, or below this one, by their names in it."""
        found = {}
        with self._inner(name) as top:
            for place, _, names, opened in os.fwalk(".", dir_fd=top):
                for one in names:
                    with suppress(ValueError, OSError):
                        status = os.stat(one, dir_fd=opened, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found[RelativeName.parse(f"{place}/{one}".removeprefix("./"))] = status.st_size
        return dict(sorted(found.items()))

    @contextmanager
    def _inner(self, name: RelativeName | None) -> Iterator[int]:
        """Yields a descriptor of a folder, or of this one."""
        with self._parent(name or RelativeName("."), makes=False) as (folder, last):
            opened = _open_folder(last, folder)
        try:
            yield opened
        finally:
            os.close(opened)

    def make_folder(self, name: RelativeName) -> Path:
        """Makes a folder if there is none, and returns its path."""
        with self._parent(name, makes=True) as (folder, last):
            with suppress(FileExistsError):
                os.mkdir(last, dir_fd=folder)
            os.close(_open_folder(last, folder))
        return self.path(name)

    def names(self, folder: RelativeName | None = None) -> list[RelativeName]:
        """Returns the names of the entries, here or in a folder of it, that are neither links nor of a strange form."""
        found = []
        with suppress(FileNotFoundError), self._inner(folder) as opened, os.scandir(opened) as entries:
            for entry in entries:
                with suppress(ValueError):
                    if not entry.is_symlink():
                        found.append(RelativeName.parse(entry.name))
        return sorted(found)

    def read(self, name: RelativeName, *, max_bytes: int) -> bytes:
        """Returns the content of a file; ValueError if it is too large, or no regular file."""
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise ValueError(f"it has {size} bytes, and at most {max_bytes} are read")
            return file.read(size)

    def rename(self, name: RelativeName, other: RelativeName) -> None:
        """Gives a file another name, in place of a file of that name."""
        with self._parent(name) as (folder, last), self._parent(other) as (other_folder, other_last):
            os.replace(last, other_last, src_dir_fd=folder, dst_dir_fd=other_folder)

    def is_folder(self, name: RelativeName) -> bool:
        """Returns whether a name is a directory here, and no part of it a link."""
        try:
            with self._parent(name) as (folder, last):
                return stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            return False


def _open_folder(name: str, parent: int) -> int:
    """Returns a descriptor of a folder in an open folder; OSError for a link, which is not followed."""
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, IS_LINK, name) from None
        raise


def _give_name(draft: str, last: str, folder: int) -> None:
    """Gives a finished draft its name, unless there is something of that name."""
    try:
        os.link(draft, last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a disk without hard links: the name comes first and the content after it
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with (
            os.fdopen(os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as source,
            os.fdopen(os.open(last, flags, 0o666, dir_fd=folder), "wb") as file,
        ):
            shutil.copyfileobj(source, file)
