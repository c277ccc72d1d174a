"""The copies of a run as an extension: claims the URL first, and copies checkpoints until the run is over."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.capabilities.lease.lease import Obstacle, take
from trainwright.capabilities.mirror.clock import MirrorClock, Pace, SystemClock
from trainwright.capabilities.mirror.lease import RemoteLease
from trainwright.capabilities.mirror.mirror import Mirror
from trainwright.capabilities.mirror.outbox import outbox_path
from trainwright.capabilities.mirror.parts import Helper, names_to_send
from trainwright.capabilities.mirror.plan import MirrorPlan
from trainwright.capabilities.mirror.remote import Copy, RemoteStore
from trainwright.capabilities.mirror.store_client import is_refusal, reason
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest
from trainwright.errors import ArgumentError, TrainwrightError
from trainwright.journal.record import FileJournal, live_journal
from trainwright.loop.extension import Extension, Run
from trainwright.support.deadline import within
from trainwright.support.repeats import RepeatedFailures

logger = logging.getLogger(__name__)

RELEASE_S = 5.0  # for the lease, at the end


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the processes of the run; by default it is alone."""

    rank: int = 0
    local_rank: int = 0  # on its node
    # Calls a function in the main process, and returns its result in all. Any: the result is of any type.
    agree: Callable[[Callable[[], Any]], Any] = lambda decide: decide()
    gather: Callable[[int], list[int]] = lambda value: [value]  # gathers a number of each process
    # Returns True, once the model is set up, where each process writes its own part of a checkpoint on a common disk.
    writes_parts: Callable[[], bool] = lambda: False


class RunMirror(Extension):
    """Copies what a run saves under a URL; only one live run may have it.

    The main process copies. Where processes of several nodes write their parts of a checkpoint on a disk that the
    nodes share, the first process of each node sends the parts of its node.

    Args:
        plan: the URL, and which checkpoints are copied and kept there.
        folder: the run's directory.
        place: this process among the processes of the run; None: it is alone.
        wait_s: how long a run waits for another run that has the URL, in seconds.
        overwrites: what happens to checkpoints of an earlier run there: True deletes them, False refuses the run.
        clock: for tests.
    """

    name = "mirror"
    order = -90

    def __init__(
        self,
        plan: MirrorPlan,
        folder: str,
        place: Place | None = None,
        *,
        wait_s: float,
        overwrites: bool | None = None,
        clock: MirrorClock | None = None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._place = Place() if place is None else place
        self._wait_s = wait_s
        self._overwrites = overwrites
        self._clock = SystemClock() if clock is None else clock
        self._pace = Pace(plan.bytes_per_s, self._clock)
        self._store: RemoteStore | None = None
        self._lease: RemoteLease | None = None
        self._mirror: Mirror | None = None
        self._helper: Helper | None = None
        self._journal: FileJournal | None = None  # of the run, which ends before the last copies do
        self._ranks: list[int] = []  # processes of this node
        self._num_nodes = 1
        self._failures = RepeatedFailures()
        self._opened: list[RemoteStore] = []  # stores with a process of their own that ends with the run
        self._token = ""
        self._sharing = ExitStack()  # while it is open, a resume uses the client of this run

    def open(self, run: Run) -> None:
        """Claims the URL. All processes call it.

        Raises:
            ArgumentError: another live run has the URL, or it cannot be written.
        """
        place = self._place
        nodes = place.gather(place.rank - place.local_rank)
        self._ranks = [rank for rank, first in enumerate(nodes) if first == place.rank - place.local_rank]
        self._num_nodes = len(set(nodes))
        self._token = place.agree(lambda: uuid.uuid4().hex)
        if place.rank == 0:
            self._store = self._new_store()
            if not self._store.is_apart:  # reading asks for more bytes than a pipe shall carry
                self._sharing.enter_context(self._store.shared())
            self._lease = RemoteLease(self._store)
        take(self, place.agree, folder=self._plan.url, wait_s=self._wait_s, argument="checkpoint_mirror")

    def _new_store(self) -> RemoteStore:
        store = RemoteStore(self._plan.url, is_apart=True, pace=self._pace)
        self._opened.append(store)
        return store

    def attempt(self) -> Obstacle | None:
        """Tries to take the lease on the URL; a store that cannot be reached is only reported."""
        assert self._store is not None
        assert self._lease is not None
        try:
            found: Obstacle | None = self._store.retried(self._lease.attempt)
        except TrainwrightError:
            raise
        except Exception as error:
            if is_refusal(error):
                raise ArgumentError(
                    f"checkpoint_mirror={str(self._store)!r} cannot be written: {reason(error)}. Look at the bucket's "
                    "name and at the credentials, which the packages of fsspec read from the environment, or leave "
                    "checkpoint_mirror out."
                ) from None
            self._failures.is_new(error)
            logger.warning(
                "checkpoint_mirror=%r cannot be reached: %s. Training starts without a claim on it, and copies what it "
                "saves when the store answers.",
                str(self._store),
                reason(error),
            )
            return None
        return found

    def begin(self, run: Run) -> None:
        """Starts the copies.

        Raises:
            ArgumentError: a fresh run finds checkpoints of an earlier one, and may not overwrite them.
        """
        helps_each_other = self._num_nodes > 1 and self._place.writes_parts()
        if helps_each_other and self._plan.bytes_per_s is not None:
            self._pace.bytes_per_s = self._plan.bytes_per_s / self._num_nodes
        outbox = outbox_path(Path(self._folder), self._plan.url)
        if helps_each_other and self._place.local_rank == 0 and self._place.rank > 0:
            self._helper = Helper(outbox, self._new_store(), self._ranks, self._token, self._clock)
            self._helper.begin()
        if self._store is None or self._lease is None:
            return
        known: list[tuple[Copy, Manifest]] = []
        try:
            known = self._store.retried(self._store.found)
        except Exception as error:
            if is_refusal(error):
                raise
            logger.info("%s could not be read: %s.", self._store, reason(error))
        came_from = run.start.checkpoint
        if came_from is None:
            self._deal_with_earlier(known)
        resumed = None if came_from is None else Checkpoint(came_from).manifest
        own = [one for _, one in known if resumed is not None and one.run_id == resumed.run_id]
        self._mirror = Mirror(
            Path(self._folder),
            self._store,
            self._plan,
            self._lease,
            tell=self._tell,
            clock=self._clock,
            failures=self._failures,
        )

        def keeps() -> set[int]:
            best = run.progress.state.best_global_step
            return run.extensions.saving.kept_steps() | ({best} if best else set())

        self._mirror.keeps = keeps
        self._pace.sign = self._mirror.signs.give
        if helps_each_other:
            self._mirror.names = partial(names_to_send, outbox, own=self._ranks, token=self._token, clock=self._clock)
        self._mirror.begin(own, continues=came_from is not None)

    def _deal_with_earlier(self, known: list[tuple[Copy, Manifest]]) -> None:
        """Deals with checkpoints of an earlier run under the URL of a fresh one, as it is done in its directory."""
        if not known:
            return
        steps = ", ".join(str(step) for step in sorted({copy.step for copy, _ in known}))
        found = f"checkpoint_mirror={str(self._store)!r} holds checkpoints of an earlier run (steps {steps})"
        if self._overwrites is False:
            raise ArgumentError(
                f"{found}, and overwrite_output_dir=False. Resume with resume_from_checkpoint='auto', choose another "
                "URL, or pass overwrite_output_dir=True to delete them."
            )
        if self._overwrites:
            assert self._store is not None
            for copy, _ in known:
                self._store.remove(copy)
            return
        logger.warning(
            "%s. This run starts afresh next to them. Resume with "
            "resume_from_checkpoint='auto', or delete them with overwrite_output_dir=True.",
            found,
        )

    def before_save(self, run: Run) -> None:
        """Lets the save go before the upload of an earlier one, in the process that hears of its end."""
        if self._mirror is not None:
            self._pace.hold()

    def committed(self, checkpoint: Path) -> None:
        """Takes a checkpoint that is on the disk."""
        self._journal = live_journal(self._folder)
        self._pace.release()
        if self._mirror is not None:
            self._mirror.committed(checkpoint)

    def close(self) -> None:
        """Waits for the copies, and gives the URL back."""
        mirror = self._mirror
        lease = self._lease
        url = str(self._store)
        self._mirror = None
        self._lease = None
        self._store = None
        helper = self._helper
        self._helper = None
        self._sharing.close()
        self._pace.release()
        try:
            if mirror is not None:
                mirror.end()
            if helper is not None:
                helper.end()
        finally:
            journal = self._journal
            self._journal = None
            if journal is not None and live_journal(self._folder) is not journal:
                journal.close()  # the entries of the last copies opened it again
            if lease is not None and not within(RELEASE_S, lease.release):
                logger.warning(
                    "%s was not given back, as the store does not answer; other runs wait until it is stale.", url
                )
            while self._opened:
                self._opened.pop().close()

    def _tell(self, **values: Any) -> None:
        """Writes an entry into the journal of the run, if it has one."""
        journal = live_journal(self._folder) or self._journal
        if journal is not None:
            journal.write("mirror", **values)
