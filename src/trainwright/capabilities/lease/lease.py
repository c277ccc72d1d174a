"""Lease: the claim of one live run on its output directory, stored in a file. Saving is handled elsewhere.

The file `.lease-<n>.json` names the holder; a thread touches it every few seconds. It is created as a hard link, which
fails if the name exists, also on network disks; no system locks are used. Whether a holder is still alive is determined

- from its process id and start time, if it runs in this boot and process namespace of this machine;
- otherwise from the file's time: a lease not touched for `STALE_S`, by the clock of the disk, is stale.

A stale lease n is taken over by creating n + 1, so only one gets it if several runs find it stale.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from trainwright.errors import ArgumentError, CheckpointWriteError
from trainwright.support.door import read_json
from trainwright.support.host import find_process_scope, is_process_alive, read_start_time

logger = logging.getLogger(__name__)

BEAT_S = 5.0
STALE_S = 60.0
# How long a run waits for one of which nothing shows that it lives: longer than until that is stale.
UNKNOWN_S = 300.0
POLL_S = 0.5  # between two attempts
MAX_BYTES = 1 << 16
LONGEST_TEXT = 255
END_OF_TIME_S = 253_402_300_799  # the end of the year 9999, in seconds since the epoch
_NAME = re.compile(r"^\.lease-(\d+)\.json$")
HELD: set[str] = set()  # tokens of the leases that trainers of this process hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Contents of a lease."""

    host: str
    place: str  # boot and process namespace of `pid`; "" if the system has none
    pid: int
    began: float  # start of the process, in seconds since the epoch
    since: float  # when the lease was taken, likewise
    token: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique to this lease

    @classmethod
    def for_this_process(cls) -> Holder:
        host, place = find_process_scope()
        pid = os.getpid()
        return cls(host=host, place=place, pid=pid, began=read_start_time(pid), since=time.time())

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """Returns the contents of a file; None if it cannot be read as a lease."""
        try:
            return cls.parse(read_json(path, max_bytes=MAX_BYTES))
        except (OSError, ValueError):
            return None

    @classmethod
    def parse(cls, values: object) -> Holder | None:
        """Returns the holder described by the values of a file; None if they are not a lease."""
        try:
            holder = cls(**values)  # type: ignore[arg-type]  # invalid values raise TypeError
        except TypeError:
            return None
        return holder if holder._is_sound() else None

    def _is_sound(self) -> bool:
        return (
            all(isinstance(text, str) and len(text) <= LONGEST_TEXT for text in (self.host, self.place, self.token))
            and type(self.pid) is int
            and 0 <= self.pid < 1 << 31
            and all(isinstance(one, (int, float)) and 0 <= one < END_OF_TIME_S for one in (self.began, self.since))
        )

    def is_alive(self) -> bool | None:
        """Returns whether the process is alive; None if this process cannot tell."""
        if self.token in HELD:
            return True
        if (self.host, self.place) != find_process_scope():
            return None
        if self.pid == os.getpid() or not is_process_alive(self.pid):
            return False
        return True if is_process_alive(self.pid, began=self.began) else None  # None: the clock may have been set

    def __str__(self) -> str:
        here = ", this process" if self.token in HELD else ""
        return f"process {self.pid} on {self.host}{here}, since {self._begin()}"

    def describe_ended(self) -> str:
        """Returns what a message says of a run that has ended: no process, whose number may now be another's."""
        return f"A run that began on {self.host} at {self._begin()}"

    def _begin(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Obstacle to taking a lease: its holder, and whether that run is known to be alive."""

    holder: str
    is_alive: bool


class Lease:
    """Lease on a directory, which is created if missing. Only the process that writes checkpoints takes one.

    If the directory is not writable, the run has no lease and logs that.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._path: Path | None = None
        self._token = ""
        self._seen: dict[Path, tuple[int, float]] = {}  # time of another run's lease, and when that time was first seen
        self._foreign: set[Path] = set()  # paths named like a lease that are not one, already reported
        self._is_over = threading.Event()
        self._beats: threading.Thread | None = None  # renews the lease's time

    def attempt(self) -> Obstacle | None:
        """Tries to take the lease; None if it was taken, or if this directory cannot have one."""
        mine = Holder.for_this_process()
        draft = self._folder / f".lease.{mine.token}.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(asdict(mine)), encoding="utf-8")
            now = draft.stat().st_mtime
            before = self._leases()
            obstacle = self._obstacle(before, now)
            if obstacle is not None:
                return obstacle
            path = self._folder / f".lease-{max((number for number, _ in before), default=0) + 1}.json"
            if not _create(draft, path):
                return Obstacle("another run that starts now", is_alive=False)
            HELD.add(mine.token)
            self._path = path
            self._token = mine.token
            self._is_over = threading.Event()
            self._beats = threading.Thread(target=self._beat, name="trainwright-lease", daemon=True)
            self._beats.start()
            obstacle = self._obstacle([one for one in self._leases() if one[1] != path], now)
            if obstacle is not None:  # two leases created at the same time: both withdraw and try again
                self.release()
                return obstacle
            for _, stale in before:
                if self._is_foreign(stale):
                    continue
                holder = Holder.read(stale)
                ended = "A run" if holder is None else holder.describe_ended()
                logger.warning("%s ended without releasing %s; this run takes it over.", ended, self._folder)
                stale.unlink(missing_ok=True)
            self._remove_drafts(now)
        except OSError as error:
            effect = "another run in it will not be noticed"
            logger.warning("%s cannot be claimed for this run alone (%s): %s.", self._folder, error, effect)
            return None
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return None

    def _remove_drafts(self, now: float) -> None:
        """Removes files left by processes that were killed while taking a lease."""
        for draft in self._folder.glob(".lease.*.partial"):
            holder = Holder.read(draft)
            # One of this process may belong to another trainer that is just taking the lease.
            is_alive = None if holder is None or holder.pid == os.getpid() else holder.is_alive()
            with suppress(OSError):  # deleted meanwhile, or a directory of that name
                if is_alive is False or (is_alive is None and now - draft.lstat().st_mtime > STALE_S):
                    draft.unlink()

    def confirm(self) -> None:
        """Confirms before a save that this run holds the lease; CheckpointWriteError if another run has it.

        A free lease is taken: it was deleted, or only a callback asks for a save.
        """
        if self._path is not None and _has_token(self._path, self._token):
            return
        had_it = self._path is not None
        self.release()
        obstacle = self.attempt()
        if obstacle is None or not (had_it or obstacle.is_alive):
            return
        why = f" since this run was not seen alive for {STALE_S:g} s" if had_it else ""
        raise CheckpointWriteError(
            f"{self._folder} belongs to {obstacle.holder},{why} and two runs would replace each other's checkpoints. "
            "This run saves nothing there; start or resume it with another output_dir."
        )

    def release(self) -> None:
        """Releases the directory. Nothing happens without a lease."""
        self._is_over.set()
        if self._beats is not None and self._beats is not threading.current_thread():
            self._beats.join(timeout=1)  # it can only be waiting for a call to the disk
            self._beats = None
        HELD.discard(self._token)
        path = self._path
        self._path = None
        if path is not None and _has_token(path, self._token):
            with suppress(OSError):
                path.unlink()

    def _beat(self) -> None:
        path = self._path
        is_over = self._is_over
        while path is not None and not is_over.wait(BEAT_S):
            with suppress(OSError):
                os.utime(path)

    def _leases(self) -> list[tuple[int, Path]]:
        return [(int(match[1]), path) for path in self._folder.iterdir() if (match := _NAME.match(path.name))]

    def _obstacle(self, leases: list[tuple[int, Path]], now: float) -> Obstacle | None:
        """Returns the first of these leases that is not stale, by the clock of the disk."""
        for _, path in leases:
            if self._is_foreign(path):
                continue
            holder = Holder.read(path)
            is_alive = None if holder is None else holder.is_alive()
            is_alive = self._has_moved(path, now) if is_alive is None else is_alive
            if is_alive is not False:
                return Obstacle(str(holder or "an unknown process"), is_alive=is_alive is True)
        return None

    def _is_foreign(self, path: Path) -> bool:
        """Returns whether a lease name is a link, pipe, device or directory, which no run creates; logs it once."""
        try:
            mode = path.lstat().st_mode
        except OSError:  # deleted meanwhile
            return False
        if stat.S_ISREG(mode):
            return False
        if path not in self._foreign:
            self._foreign.add(path)
            logger.warning("%s is not a lease of a run: it is not a regular file. It is ignored; delete it.", path)
        return True

    def _has_moved(self, path: Path, now: float) -> bool | None:
        """Returns True if a lease was touched since it was first seen, False once it is stale, None until then."""
        try:
            touched = path.stat()
        except FileNotFoundError:
            return False
        seen, since = self._seen.setdefault(path, (touched.st_mtime_ns, time.monotonic()))
        if touched.st_mtime_ns != seen:
            return True
        is_stale = now - touched.st_mtime > STALE_S or time.monotonic() - since > STALE_S
        return False if is_stale else None


class Claim(Protocol):
    """A lease that can be taken."""

    def attempt(self) -> Obstacle | None:
        """Tries to take the lease; None if it was taken."""


def take(
    lease: Claim,
    agree: Callable[[Callable[[], bool]], bool],
    *,
    folder: str,
    wait_s: float,
    argument: str = "output_dir",
) -> None:
    """Takes a lease for a run; ArgumentError if another live run holds it for more than `wait_s`.

    All processes must call it, and the main one decides: `agree` calls a function there, and returns its result in all.
    `argument` is the name of the argument that sets `folder`.
    """
    begun = time.monotonic()
    told: list[str] = []

    def attempt() -> bool:
        obstacle = lease.attempt()
        if obstacle is None:
            return True
        limit_s = wait_s if obstacle.is_alive else max(wait_s, UNKNOWN_S)
        if time.monotonic() - begun >= limit_s:
            raise ArgumentError(
                f"{argument}={folder!r} is in use by {obstacle.holder}: two runs would replace each other's "
                f"checkpoints. Choose another {argument}, end that run, or wait for it (output_dir_wait_s=3600)."
            )
        if obstacle.holder not in told:
            told.append(obstacle.holder)
            logger.warning("Waiting for %s=%r, which is held by %s.", argument, folder, obstacle.holder)
        return False

    while not agree(attempt):
        time.sleep(POLL_S)


def _create(draft: Path, path: Path) -> bool:
    """Also gives the file its final name, if the name is free."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # a disk without hard links
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(draft.read_text(encoding="utf-8"))
        except FileExistsError:
            return False
    return True


def _has_token(path: Path, token: str) -> bool:
    holder = Holder.read(path)
    return holder is not None and holder.token == token
