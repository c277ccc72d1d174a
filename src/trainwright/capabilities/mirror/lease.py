"""Lease on a URL: the claim of one live run on the checkpoints there, in an object.

The object `.lease-<n>.json` names the holder, who writes it again every few seconds. Only the highest number counts,
and no number is used twice: a released lease stays as an object that says so, and the next run takes the next number.

Two runs never both take a lease, where a store creates an object only if there is none (S3, GCS, Azure, local
directories, memory):

- Runs that want number n + 1 have seen that n is released or stale. One of them creates n + 1; the others find it.
- A run that looked long ago, and was suspended since, may want a number that was used and deleted. It creates that, but
  then finds a higher one: only lower numbers are deleted, and only while a higher one is there. So it has no lease, and
  the holder of the highest number keeps its own.
- Deleting the lease at its release would break this: numbers would start again at 1, and such a late run would create
  number 2 over the number 1 of a run that has just begun.

A lease is created twice. Where the second call does not fail, the store ignores the condition, as some servers for S3
do: then, and where a store has no condition, the object is read back after a while, and the last writer has it.

Whether a holder lives is read from its process, on the same machine; elsewhere from the age of the object by the
store's clock, read from an object that was just written. So no clock of a machine counts.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from trainwright.capabilities.lease.lease import HELD, Holder, Obstacle
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.capabilities.mirror.store_client import reason
from trainwright.errors import CheckpointWriteError
from trainwright.support.door import parse_json

logger = logging.getLogger(__name__)

BEAT_S = 15.0
STALE_S = 90.0
SETTLE_S = 2.0  # until an object is read back, if the store writes it unconditionally
NUM_LOOKS = 5  # at a listing that lacks what was written
RELEASED = b'{"released": true}'
_NAME = re.compile(r"\.lease-([0-9]{1,15})\.json")


class RemoteLease:
    """Lease on a URL. Only the process that writes checkpoints takes one.

    Args:
        store: the URL.
        pause: waits for a number of seconds.
    """

    def __init__(self, store: RemoteStore, *, pause: Callable[[float], object] = time.sleep) -> None:
        self._store = store
        self._pause = pause
        self._number: int | None = None
        self._holder: Holder | None = None
        self._seen: dict[int, float] = {}  # time of the lease of another run, when it was first seen
        self._is_over = threading.Event()
        self._beats: threading.Thread | None = None

    def attempt(self) -> Obstacle | None:
        """Tries to take the lease; None if it was taken. Raises the errors of the store."""
        mine = Holder.for_this_process()
        before = self._highest()
        left = None if before is None else self._store.read(_name(before))
        is_released = before is None or left == RELEASED
        if before is not None and not is_released:
            obstacle = self._obstacle(before, mine)
            if obstacle is not None:
                return obstacle
        number = 1 if before is None else before + 1
        HELD.add(mine.token)  # before it can be read: another run of this process would take it for a dead one's
        is_taken = False
        try:
            is_taken = self._create(number, mine) and self._is_highest(number)
        finally:
            if not is_taken:
                HELD.discard(mine.token)
        if not is_taken:
            self._check_listing(number)
            return Obstacle("another run that starts now", is_alive=False)
        self._number = number
        self._holder = mine
        if not is_released:
            holder = _parsed(left)
            ended = "A run" if holder is None else holder.describe_ended()
            logger.warning("%s ended without releasing %s; this run takes it over.", ended, self._store)
        if before is not None:
            self._store.delete([_name(one) for one in self._numbers() if one < number])
        self._is_over = threading.Event()
        self._beats = threading.Thread(
            target=self._beat, args=(number, mine, self._is_over), name="trainwright-mirror-lease", daemon=True
        )
        self._beats.start()
        return None

    def confirm(self) -> int:
        """Confirms that the lease is this run's, and returns its number; takes it if it is free.

        Raises:
            CheckpointWriteError: another run has the URL.
        """
        if self._number is not None and self._highest() == self._number and self._is_mine(self._number):
            return self._number
        had_it = self._number is not None
        self._forget()
        obstacle = self.attempt()
        if obstacle is not None:
            why = f" since this run gave no sign of life for {STALE_S:g} s" if had_it else ""
            raise CheckpointWriteError(
                f"{self._store} belongs to {obstacle.holder},{why} and two runs would replace each other's "
                "checkpoints. This run copies nothing there any more; its own directory has them."
            )
        assert self._number is not None
        return self._number

    def release(self) -> None:
        """Gives the URL back. Nothing happens without a lease."""
        number = self._number
        holder = self._holder
        self._forget()  # first, as a store may hang
        with suppress(Exception):  # a store that is away: the lease becomes stale
            if number is not None and holder is not None and self._read(number) == holder:
                self._store.overwrite(_name(number), RELEASED)

    def _forget(self) -> None:
        self._is_over.set()
        if self._beats is not None and self._beats is not threading.current_thread():
            self._beats.join(timeout=1)  # it is at most in a call of the store
        self._beats = None
        if self._holder is not None:
            HELD.discard(self._holder.token)
        self._holder = None
        self._number = None

    def _beat(self, number: int, mine: Holder, is_over: threading.Event) -> None:
        while not is_over.wait(BEAT_S):
            with suppress(BaseException):  # the store is away: the next one comes soon
                if self._is_mine(number):
                    self._store.overwrite(_name(number), _content(mine))

    def _obstacle(self, number: int, mine: Holder) -> Obstacle | None:
        """Returns who holds a lease, unless that is stale."""
        holder = self._read(number)
        is_alive = None if holder is None else holder.is_alive()
        if is_alive is None:
            is_alive = self._has_moved(number, mine)
        return None if is_alive is False else Obstacle(str(holder or "an unknown process"), is_alive=is_alive is True)

    def _has_moved(self, number: int, mine: Holder) -> bool | None:
        """Returns True if a lease was written since it was first seen, False once it is stale, None until then."""
        draft = f".lease.{mine.token}.partial"
        self._store.overwrite(draft, b"")
        try:
            now = self._store.modified(draft)
            written = self._store.modified(_name(number))
        except FileNotFoundError:
            return False
        finally:
            self._store.delete([draft])
        if written != self._seen.setdefault(number, written):
            return True
        return False if now - written > STALE_S else None

    def _create(self, number: int, mine: Holder) -> bool:
        """Creates a lease; returns False if another run has created it."""
        is_conditional = True
        try:
            with suppress(FileExistsError):  # it may be ours all the same: a first answer that was lost on the way
                self._store.create(_name(number), _content(mine))
                self._store.create(_name(number), _content(mine))
                is_conditional = False
        except (NotImplementedError, ValueError, TypeError) as error:  # the store has no condition
            logger.info("%s: a lease without a condition (%s).", self._store, reason(error))
            if self._store.read(_name(number)) is not None:
                return False
            self._store.overwrite(_name(number), _content(mine))
            is_conditional = False
        if not is_conditional:
            self._pause(SETTLE_S)
        found = self._read(number)
        return found is not None and found.token == mine.token

    def _is_highest(self, number: int) -> bool:
        """Returns True if no higher number is there; otherwise deletes this one, which a run created too late."""
        highest = self._highest()
        if highest is not None and highest > number:
            self._store.delete([_name(number)])
        return highest == number

    def _check_listing(self, number: int) -> None:
        """Raises OSError if the store lists no lease, although one of this number is there."""
        for _ in range(NUM_LOOKS):
            if self._highest() is not None or self._read(number) is None:
                return
            self._pause(SETTLE_S)
        raise OSError(
            f"{self._store} does not list {_name(number)}, which can be read there, so no run can hold the URL. "
            "Look at the rights to list objects."
        )

    def _is_mine(self, number: int) -> bool:
        found = self._read(number)
        return found is not None and self._holder is not None and found.token == self._holder.token

    def _read(self, number: int) -> Holder | None:
        return _parsed(self._store.read(_name(number)))

    def _numbers(self) -> list[int]:
        return [int(match[1]) for name in self._store.names() if (match := _NAME.fullmatch(name))]

    def _highest(self) -> int | None:
        return max(self._numbers(), default=None)


def _name(number: int) -> str:
    return f".lease-{number}.json"


def _content(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _parsed(content: bytes | None) -> Holder | None:
    try:
        return None if content is None else Holder.parse(parse_json(content))
    except ValueError:
        return None
