"""Copies of one run's checkpoints at a URL: which, when, and the handling of failures.

A checkpoint that is due waits in a directory of links to its files, so neither the rotation of local checkpoints nor
the end of the process loses it. A thread sends one at a time, tries again after a failure, and never raises: training
continues. A newer checkpoint replaces a waiting one, unless that is the best.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainwright._types import counted
from trainwright.capabilities.mirror.clock import END_PATIENCE_S, MirrorClock, Signs, SystemClock
from trainwright.capabilities.mirror.outbox import Outbox, best_step
from trainwright.capabilities.mirror.plan import MirrorPlan
from trainwright.capabilities.mirror.remote import RUN_FILES, RUN_FOLDER, Copy, RemoteStore
from trainwright.capabilities.mirror.store_client import reason
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore, Keep, Saved, to_remove
from trainwright.errors import CheckpointError, CheckpointWriteError
from trainwright.support.door import RelativeName
from trainwright.support.repeats import RepeatedFailures
from trainwright.support.units import duration_text, size_text

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 120.0
NICENESS = 5  # priority of the thread, if the system supports thread priorities


class MirrorClaim(Protocol):
    """Claim of this run on the URL."""

    def confirm(self) -> int:
        """Returns the number of this run's lease; raises CheckpointWriteError where another run has the URL."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which every attempt fails."""

    since_s: float  # on the clock of the mirror
    first: BaseException  # failure of the first attempt


class Mirror:
    """Copies checkpoints of the run in a directory to a URL, on a thread of its own.

    Args:
        folder: the run's directory.
        store: the URL.
        plan: which checkpoints are copied and kept.
        claim: this run's claim on the URL.
        tell: called for the journal with the step and the result of each copy.
        clock: for tests.
        failures: those of the store that were said before.
    """

    def __init__(
        self,
        folder: Path,
        store: RemoteStore,
        plan: MirrorPlan,
        claim: MirrorClaim,
        *,
        tell: Callable[..., None] = lambda **values: None,
        clock: MirrorClock | None = None,
        failures: RepeatedFailures | None = None,
    ) -> None:
        self.outbox = Outbox(folder, plan.url)
        # Returns the files of a checkpoint that this process sends under a lease; when it ends, all files are there.
        self.names: Callable[[Manifest, int], Iterable[str]] = all_files
        # Returns steps whose copies stay: the best so far, and those that may become it, as their evaluations are open.
        self.keeps: Callable[[], set[int]] = set
        self._folder = folder
        self._store = store
        self._plan = plan
        self._claim = claim
        self._tell = tell
        self._clock = SystemClock() if clock is None else clock
        self.signs = Signs()  # that the thread gets on
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: Path | None = None  # newest checkpoint of the run, copied or not
        self._staged_at: float | None = None  # when the checkpoint that was staged last was written
        self._sent: dict[Copy, Manifest] | None = None  # checkpoints under the URL; None until they are read
        self._number = 0  # of the lease under which copies are made
        self._files: dict[str, tuple[int, int]] = {}  # size and time of the run's files that were sent
        self._is_ending = False
        self._is_cleaned = False
        self._is_lost = False  # another run has the URL
        self._is_left = False  # it did not end in time: it sends nothing more
        self._outage: Outage | None = None
        self._failures = RepeatedFailures() if failures is None else failures

    # -- called by the run ---------------------------------------------------------------------------------------------

    def begin(self, known: list[Manifest], *, continues: bool) -> None:
        """Starts the thread.

        Files left waiting by an earlier training in this directory are sent if this run `continues`.

        `known` are the checkpoints under the URL of the run that is continued.
        """
        self._staged_at = max((one.written_at for one in known), default=None)
        self.outbox.clear(keeps_checkpoints=continues)
        self._thread = threading.Thread(target=self._work, name="trainwright-mirror", daemon=True)
        self._thread.start()
        self._wake.set()

    def committed(self, checkpoint: Path) -> None:
        """Takes a checkpoint on disk, if a copy is due; an error is logged."""
        manifest = Manifest.read(checkpoint)
        if manifest is None or checkpoint.parent != self._folder or self._is_lost:
            return
        self._last = checkpoint
        if self._is_due(manifest):
            self._stage(checkpoint, manifest)

    def _is_due(self, manifest: Manifest) -> bool:
        if self._plan.every_s is None or self._staged_at is None:
            return True
        return not 0 <= manifest.written_at - self._staged_at < self._plan.every_s  # a clock that was set back: due

    def _stage(self, checkpoint: Path, manifest: Manifest) -> None:
        """Puts links to the files of a checkpoint, and of the best one, into the outbox, and wakes the thread."""
        best = best_step(checkpoint)
        wanted = {manifest.step: (checkpoint, manifest)}
        if best is not None and best != manifest.step:
            path = CheckpointStore(self._folder).path(best)
            of_best = Manifest.read(path)
            if of_best is not None and not self._has(of_best):
                wanted[best] = (path, of_best)
        try:
            for path, listed in wanted.values():
                self.outbox.add(path, listed)
        except (OSError, ValueError) as error:  # ValueError: a name in a manifest leads out of its checkpoint
            if self._failures.is_new(error):
                logger.warning(
                    "%s cannot be prepared for its copy to %s: %s. Training continues; it is tried again at each save.",
                    checkpoint,
                    self._store,
                    reason(error),
                )
            return
        self._staged_at = manifest.written_at
        self._wake.set()

    def _stage_kept(self, newest: Manifest) -> None:
        """Puts checkpoints into the outbox that became the best, or may, after the newest one was saved."""
        for step in self.keeps() - {newest.step}:
            path = CheckpointStore(self._folder).path(step)
            manifest = Manifest.read(path)
            if manifest is not None and manifest.run_id == newest.run_id and not self._has(manifest):
                with suppress(OSError, ValueError):  # it is in the run's directory, at least
                    self.outbox.add(path, manifest)

    def _has(self, manifest: Manifest) -> bool:
        """Returns True if there is a copy of a checkpoint."""
        return any(one.identity == manifest.identity for one in list((self._sent or {}).values()))

    def end(self) -> None:
        """Sends the newest checkpoint and the files of the run, and waits for it; a store that is away is left."""
        thread = self._thread
        if thread is None:
            return
        self._thread = None
        manifest = None if self._last is None else Manifest.read(self._last)
        if self._last is not None and manifest is not None:
            if not self._has(manifest):
                self._stage(self._last, manifest)
            self._stage_kept(manifest)
        self._is_ending = True
        self._wake.set()
        if any(True for _ in self.outbox.waiting()):
            logger.info("Waiting for copies to %s.", self._store)
        self._is_left = not self.signs.wait_for(thread, self._clock)
        if self._failures.num_repeated:
            logger.warning(
                "Copies to %s failed %s in this run, for the causes that were named.",
                self._store,
                counted(self._failures.num_repeated, "more time"),
            )
        waiting = [path.name for path, _ in self.outbox.waiting()]
        if waiting and not self._is_lost:
            logger.warning(
                "%s has no copy of %s: %s. The files wait in %s; resume the run in this directory to send them.",
                self._store,
                ", ".join(waiting),
                "the store does not answer" if self._is_left else "the store could not be reached",
                self.outbox.path,
            )
        else:
            self.outbox.remove_if_empty()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with suppress(AttributeError, OSError):  # Linux has a priority for each thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        pause_s = FIRST_PAUSE_S
        while not self._is_lost and not self._is_left:
            is_ending = self._is_ending  # read before the files: everything there by then is sent
            self._wake.clear()
            try:
                self._send_all()
            except CheckpointWriteError as error:  # another run has the URL
                self._is_lost = True
                logger.error("%s", error)
                self._tell(error=str(error))
            except BaseException as error:  # of a client: CancelledError and SystemExit end no copies either
                if self._is_left:
                    return
                now = self._clock.now()
                if self._outage is None:
                    self._say_failure(error)
                    self._outage = Outage(now, error)
                if is_ending and now - self._outage.since_s >= END_PATIENCE_S:
                    return
                self._clock.wait(self._wake, pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S if not self._is_ending else FIRST_PAUSE_S)
                self._reconnect()
            else:
                pause_s = FIRST_PAUSE_S
                if is_ending:
                    return
                if not self._wake.is_set():
                    self._clock.wait(self._wake, None)

    def _say_failure(self, error: BaseException) -> None:
        if self._failures.is_new(error):
            logger.warning(
                "%s cannot be written: %s. Training continues; checkpoints wait in %s and are sent when the store "
                "answers.",
                self._store,
                reason(error),
                self.outbox.path,
            )
        self._tell(error=reason(error))

    def _reconnect(self) -> None:
        with suppress(BaseException):
            self._store.reconnect()

    def _send_all(self) -> None:
        """Sends the waiting checkpoints, newest first, then the files of the run."""
        self.outbox.take_newest(self.keeps())
        self._number = self._claim.confirm()
        if self._outage is None:
            self.signs.give()
        if self._sent is None:
            if not self._is_cleaned:
                self._store.clean(self._number)
                self._is_cleaned = True
            self._sent = dict(self._store.found())
        while (upload := self.outbox.take_newest(self.keeps())) is not None:
            self._send(*upload)
        self._send_files()
        outage = self._outage
        if outage is not None:
            away_s = self._clock.now() - outage.since_s
            self._outage = None
            if self._failures.is_first_recovery(outage.first):
                logger.warning(
                    "%s answers again after %s; nothing is missing there.", self._store, duration_text(away_s)
                )

    def _send(self, folder: Path, manifest: Manifest) -> None:
        assert self._sent is not None
        begun = self._clock.now()
        if not self._has(manifest):
            try:
                self._store.upload(
                    folder,
                    manifest,
                    number=self._number,
                    names=lambda one: self.names(one, self._number),
                    confirm=self._confirm,
                )
            except (CheckpointError, FileNotFoundError) as error:
                if isinstance(error, CheckpointWriteError):
                    raise
                if not self.outbox.is_current(folder, manifest):
                    return  # it is queued again
                if Checkpoint(folder).find_problem() is None:
                    raise
                self._stage_again(folder, error)
                return
            size = sum(entry["size"] for entry in manifest.files.values())
            seconds = self._clock.now() - begun
            logger.info("%s has %s: %s in %s.", self._store, folder.name, size_text(size), duration_text(seconds))
            self._tell(step=manifest.step, seconds=seconds, bytes=size)
            self._sent[Copy(manifest.step, self._number)] = manifest
            self.signs.give()
        best = best_step(folder)
        self.outbox.remove_sent(folder, manifest)
        self._rotate(manifest, best)

    def _confirm(self) -> None:
        """Raises an error unless the lease is the one under which the copies are made, and the run waits for them."""
        if self._is_left:
            raise ConnectionError("the run has ended without this copy")
        if self._claim.confirm() != self._number:
            raise ConnectionError("the lease was lost and taken again, so the copy is made anew")

    def _stage_again(self, folder: Path, error: Exception) -> None:
        """Replaces a checkpoint in the outbox, whose files changed, by the current one in the run's directory."""
        self.outbox.remove(folder.name)
        original = self._folder / folder.name
        manifest = Manifest.read(original)
        if manifest is None or Checkpoint(original).find_problem() is not None:
            if self._failures.is_new(error):
                logger.warning("%s is not copied to %s: %s.", original, self._store, reason(error))
            return
        self.outbox.add(original, manifest)

    def _rotate(self, newest: Manifest, best: int | None) -> None:
        """Deletes the copies of this run that the plan no longer keeps."""
        assert self._sent is not None
        own = {copy: one for copy, one in self._sent.items() if one.run_id == newest.run_id}
        last = {copy.step: copy for copy in sorted(own)}  # the copy of the last lease
        saved = [Saved(step, own[copy].written_at) for step, copy in last.items()]
        steps = to_remove(saved, Keep(last=self._plan.keep_last), newest=max(last), best=best) - self.keeps()
        for copy in own:
            if copy.step in steps or copy != last[copy.step]:
                self._confirm()
                self._store.remove(copy)
                self.signs.give()
                del self._sent[copy]

    def _send_files(self) -> None:
        """Sends the files of the run that are new or have changed."""
        for path in self._run_files():
            name = path.relative_to(self._folder).as_posix()
            try:
                status = path.stat()
                mark = status.st_size, status.st_mtime_ns
                if self._files.get(name) != mark:
                    self._confirm()
                    self._store.put(path, name)
                    self._files[name] = mark
            except FileNotFoundError:
                if path.exists():  # it is the store that has no such place
                    raise

    def _run_files(self) -> Iterator[Path]:
        for name in RUN_FILES:
            if (self._folder / name).is_file() and not (self._folder / name).is_symlink():
                yield self._folder / name
        with suppress(OSError):  # there is none, or it is a link
            for name in self.outbox.files.files(RelativeName.parse(RUN_FOLDER)):
                yield self._folder / RUN_FOLDER / name


def all_files(manifest: Manifest, number: int) -> Iterable[str]:
    """Returns the files of a checkpoint."""
    return manifest.files
