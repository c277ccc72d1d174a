"""One checkpoint that several nodes upload together: who sends which file, agreed by files on the disk they share.

The main process lists a checkpoint in a directory of the outbox, the order. The first process of each node takes the
files that the processes of its node wrote, and marks each as taken and as done. The main process itself sends files
that are not taken in time, or for which the taker gives no sign of life, so a dead node only costs time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trainwright.capabilities.mirror.clock import MirrorClock, Signs
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.capabilities.mirror.shares import find_owner
from trainwright.capabilities.mirror.store_client import reason
from trainwright.checkpoint.manifest import Manifest
from trainwright.support.door import OwnFolder, RelativeName, parse_json, parse_step

logger = logging.getLogger(__name__)

PREFIX = ".order-"
CONTENT = "order"
MAX_ORDER_BYTES = 4096
TAKE_S = 5.0  # how long a file waits for its node
SILENT_S = 60.0  # a taker without a sign of life for so long is given up
LOOK_S = 0.2
IDLE_S = 5.0  # at the end of a run: how long a node waits for a last order


class PartsOrder:
    """Files of one checkpoint in the outbox that other nodes shall send.

    Args:
        outbox: directory with the checkpoints that wait, on a disk that all nodes share.
        manifest: of the checkpoint.
        token: of the run; orders that an earlier run left have another one.
        number: of the lease under which the files are sent; None: as the order says.
    """

    def __init__(self, outbox: Path, manifest: Manifest, token: str, number: int | None = None) -> None:
        self._folder = outbox / f"{PREFIX}{manifest.step}"
        self._run = OwnFolder(outbox.parent)
        self._numbers = {name: number for number, name in enumerate(sorted(manifest.files))}
        self._content = f"{token} {manifest.identity} "
        self.number = self._read_number() if number is None else number

    def open(self) -> None:
        """Places the order."""
        self.close()
        self._run.put(self._name(CONTENT), f"{self._content}{self.number}".encode())

    def close(self) -> None:
        """Withdraws it."""
        with suppress(OSError):
            self._run.remove(self._name())

    def is_open(self) -> bool:
        """Returns True while it is to be carried out."""
        return self._read_number() == self.number is not None

    def _read_number(self) -> int | None:
        """Returns the number in an order of this run for this checkpoint; None without one."""
        with suppress(OSError, ValueError):
            content = self._run.read(self._name(CONTENT), max_bytes=MAX_ORDER_BYTES).decode()
            if content.startswith(self._content):
                return parse_step(parse_json(content.removeprefix(self._content)))
        return None

    def take(self, name: str) -> bool:
        """Takes a file; returns False if it was taken before, or the order was withdrawn."""
        try:
            self._run.open(self._name(self._file(name, "taken")), "xb", makes=False).close()
        except OSError:
            return False
        return True

    def give_back(self, name: str) -> None:
        """Leaves a file to others."""
        with suppress(FileNotFoundError):
            self._run.unlink(self._name(self._file(name, "taken")))

    def sign(self, name: str) -> None:
        """Gives a sign of life of the taker."""
        with suppress(OSError):
            os.utime(self._path(name, "taken"))

    def last_sign(self, name: str) -> int | None:
        """Returns when the taker gave its last sign, in nanoseconds; None: it was not taken."""
        try:
            return self._path(name, "taken").stat().st_mtime_ns
        except OSError:
            return None

    def tell_done(self, name: str) -> None:
        """Marks a file as sent."""
        with suppress(OSError):  # withdrawn
            self._run.open(self._name(self._file(name, "done")), "wb", makes=False).close()

    def is_done(self, name: str) -> bool:
        """Returns True for a file that was sent."""
        return self._path(name, "done").is_file()

    def _path(self, name: str, what: str) -> Path:
        return self._folder / self._file(name, what)

    def _file(self, name: str, what: str) -> str:
        return f"{self._numbers[name]}.{what}"

    def _name(self, *parts: str) -> RelativeName:
        """Returns a name in the directory of the order, below that of the run."""
        return RelativeName.parse("/".join((self._folder.parent.name, self._folder.name, *parts)))


def names_to_send(
    outbox: Path, manifest: Manifest, number: int, *, own: Sequence[int], token: str, clock: MirrorClock
) -> Iterator[str]:
    """Yields the files of a checkpoint that the main process sends; when it ends, the other nodes have sent the rest.

    Args:
        outbox: directory with the checkpoint.
        manifest: of the checkpoint.
        number: of the lease under which it is sent.
        own: ranks of the processes of this node.
        token: of the run.
        clock: gives the time, and waits.
    """
    owners = {name: find_owner(name) for name in manifest.files}
    others = [name for name, owner in owners.items() if owner is not None and owner not in own]
    if not others:
        yield from manifest.files
        return
    order = PartsOrder(outbox, manifest, token, number)
    order.open()
    never = threading.Event()
    try:
        yield from (name for name in manifest.files if name not in others)
        begun = clock.now()
        signs: dict[str, tuple[int, float]] = {}  # last sign of each taker, and when it was seen first
        while others := [name for name in others if not order.is_done(name)]:
            for name in others:
                sign = order.last_sign(name)
                if sign is None:
                    is_left = clock.now() - begun >= TAKE_S and order.take(name)
                else:
                    if name not in signs or signs[name][0] != sign:
                        signs[name] = (sign, clock.now())
                    is_left = clock.now() - signs[name][1] >= SILENT_S
                if is_left:
                    yield name
                    order.tell_done(name)
            clock.wait(never, LOOK_S)
    finally:
        order.close()


class Helper:
    """Sends the files of this node's processes, on a thread of the first of them.

    Args:
        outbox: directory in which the main process places orders.
        store: the URL.
        ranks: processes of this node.
        token: of the run.
        clock: gives the time, and waits.
    """

    def __init__(self, outbox: Path, store: RemoteStore, ranks: Sequence[int], token: str, clock: MirrorClock) -> None:
        self._outbox = outbox
        self._store = store
        self._ranks = ranks
        self._token = token
        self._clock = clock
        self._failed: set[tuple[str, str]] = set()  # checkpoints and files that are left to the main process
        self._signs = Signs()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="trainwright-mirror-helper", daemon=True)

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def end(self) -> None:
        """Waits for the last orders."""
        self._is_over.set()
        if not self._signs.wait_for(self._thread, self._clock):
            logger.warning("%s does not answer: this node's last files are left to the main process.", self._store)

    def _work(self) -> None:
        idle_since = self._clock.now()
        never = threading.Event()
        while True:
            self._signs.give()
            if self._carry_out():
                idle_since = self._clock.now()
            is_idle = self._clock.now() - idle_since >= IDLE_S
            if self._is_over.is_set() and (is_idle or not self._outbox.exists()):
                return
            self._clock.wait(never, LOOK_S)

    def _carry_out(self) -> bool:
        """Sends everything that is ready; returns False if there was nothing."""
        found = False
        for folder in self._outbox.glob(f"{PREFIX}*"):
            checkpoint = self._outbox / f"checkpoint-{folder.name.removeprefix(PREFIX)}"
            manifest = Manifest.read(checkpoint)
            if manifest is None:
                continue
            order = PartsOrder(self._outbox, manifest, self._token)
            for name in manifest.files:
                if order.number is None:
                    break
                is_own = find_owner(name) in self._ranks and (manifest.identity, name) not in self._failed
                if is_own and order.is_open() and order.take(name):
                    found = True
                    self._send(order, checkpoint, manifest, name)
        return found

    def _sign(self, order: PartsOrder, name: str) -> None:
        self._signs.give()
        order.sign(name)

    def _send(self, order: PartsOrder, checkpoint: Path, manifest: Manifest, name: str) -> None:
        try:
            assert order.number is not None
            self._store.put_part(
                checkpoint / name, manifest, name, number=order.number, sign=lambda: self._sign(order, name)
            )
        except BaseException as error:  # the main process sends it, and says what is wrong
            logger.info("%s of %s could not be sent to %s: %s.", name, checkpoint.name, self._store, reason(error))
            self._failed.add((manifest.identity, name))
            order.give_back(name)
            with suppress(BaseException):
                self._store.reconnect()
        else:
            order.tell_done(name)
