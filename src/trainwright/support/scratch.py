"""Directories for temporary files of a run, which the next run removes if their run was killed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from trainwright.support.door import OwnFolder
from trainwright.support.host import find_process_scope, is_process_alive

PREFIX = "trainwright"


def make_scratch_folder(purpose: str) -> Path:
    """Makes a directory that only this user can read, after those of runs that are gone were removed.

    Its name has the machine, its boot, the namespace of processes and the number of this process.
    """
    sweep_scratch_folders(purpose)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{purpose}-{owner_mark()}-"))


def sweep_scratch_folders(purpose: str) -> None:
    """Removes directories of this user and machine whose process is gone; those of other containers stay."""
    remove_left(Path(tempfile.gettempdir()), f"{PREFIX}-{purpose}-")


def owner_mark() -> str:
    """Returns what names this process in a directory's name: machine, boot, namespace of processes, and number."""
    return "-".join(_owner())


def remove_left(place: Path, start: str, end: str = "") -> None:
    """Removes directories of this user and machine whose process is gone; links, and those of others, stay.

    Args:
        place: directory that they are in.
        start: how their names begin; `owner_mark()`, "-" and a word without "-" follow.
        end: how their names end.
    """
    host, boot, namespace, _ = _owner()
    folder = OwnFolder(place)
    for name in folder.names():
        owner = name.removeprefix(start).removesuffix(end).split("-")
        if len(owner) != 5 or owner[0] != host or not (name.startswith(start) and name.endswith(end)):
            continue
        is_of_this_boot = owner[1] == boot
        if is_of_this_boot and (owner[2] != namespace or not _is_gone(owner[3])):
            continue
        with suppress(OSError):
            if folder.path(name).lstat().st_uid == os.geteuid():
                folder.remove(name)


def _owner() -> tuple[str, str, str, str]:
    """Returns machine, boot and namespace in letters and digits, and the number of this process."""
    host, place = find_process_scope()
    boot, _, namespace = place.partition(" ")
    return _short(host), _short(boot), _short(namespace), str(os.getpid())


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _is_gone(pid: str) -> bool:
    return pid.isascii() and pid.isdigit() and len(pid) < 11 and not is_process_alive(int(pid))
