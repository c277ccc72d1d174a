"""Uploader: what a run uploads, when, and what becomes of an upload that fails. It never ends or holds up a training.

Every upload waits in the outbox until the Hub has it. One is in flight at a time. What is saved meanwhile, and what
failed, is made up for when the training ends, the newest of each place alone; what still fails then waits for the next
training in the same directory, or for `trainwright push`.
"""

from __future__ import annotations

import atexit
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

from trainwright._types import replacing, without_tokens
from trainwright.hub import file_selection
from trainwright.hub.client import HubClient, is_permanent_error, without_bars
from trainwright.hub.outbox import Outbox, Ticket, Upload, is_over, superseded

LOOK_S = 0.1  # how often a wait asks whether it should end

Job: TypeAlias = "Future[object]"


class PushInProgress:
    """Group of uploads, as `trainer.push_in_progress`.

    Attributes:
        jobs: a future for each.
    """

    def __init__(self, jobs: list[Job] | None = None) -> None:
        self.jobs: list[Job] = [] if jobs is None else jobs

    def is_done(self) -> bool:
        return all(job.done() for job in self.jobs)

    def wait_until_done(self, *, unless: Callable[[], bool] = bool) -> bool:
        """Waits for all of them; returns False as soon as `unless` says so."""
        while not self.is_done():
            if unless():
                return False
            futures.wait(self.jobs, timeout=LOOK_S)
        return True

    def cancel(self) -> None:
        """Cancels uploads that have not begun; others continue."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]


class UploadQueue:
    """Runs work on a thread, which lasts as long as there is work."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Job, Callable[[], object]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_left = 0
        self._thread: threading.Thread | None = None
        self._is_abandoned = False

    def submit(self, work: Callable[[], object], job: Job | None = None) -> Job:
        """Queues `work`; its result, or its error, is in the future."""
        job = Future() if job is None else job
        with self._lock:
            self._work.put((job, work))
            self._num_left += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hub-uploads", daemon=True)
                self._thread.start()
                # Before pools of threads stop to take work at the end of the process: clients use them to upload.
                getattr(threading, "_register_atexit", atexit.register)(self._wait_at_the_end)
        return job

    def abandon(self) -> None:
        """Lets the process end without waiting for the queue."""
        self._is_abandoned = True

    def _run(self) -> None:
        while True:
            job, work = self._work.get()
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(work())
                except BaseException as error:
                    job.set_exception(error)
            with self._lock:
                self._num_left -= 1
                if self._num_left == 0:
                    self._thread = None
                    return

    def _wait_at_the_end(self) -> None:
        thread = self._thread
        while thread is not None and thread.is_alive() and not self._is_abandoned:
            thread.join(LOOK_S)
            thread = self._thread


logger = logging.getLogger(__name__)

WhenThere = Callable[[Callable[[bool], None]], None]  # calls back when a checkpoint is there, or never will be
Tell = Callable[..., None]


class Uploader:
    """Uploads one output directory to one repository.

    Args:
        root: the output directory.
        name: repository, with or without its owner.
        tell: gets what happens, for the journal: the step, where to, and what came of it.

    Attributes:
        repo: full name of the repository, once the Hub has told it.
        progress: the uploads under way.
    """

    def __init__(
        self, root: str | Path, name: str, *, client: HubClient, private: bool | None = None,
        revision: str | None = None, tell: Tell = lambda **values: None,
    ) -> None:  # fmt: skip
        self.repo: str | None = None
        self.progress = PushInProgress()
        self._root, self._name = Path(root), name
        self._client, self._private, self._revision = client, private, revision
        self._outbox, self._lane, self._tell = Outbox(root), UploadQueue(), tell
        self._in_lane: set[Path] = set()

    @property
    def is_busy(self) -> bool:
        return not self.progress.is_done()

    def open(self) -> str:
        """Makes the repository if need be, and returns its name; the short one where the Hub is away.

        Raises:
            HfHubHTTPError, ValueError: the Hub refuses (no login, no permission), or the name cannot be one.
        """
        try:
            return self._repo()
        except Exception as error:
            if is_permanent_error(error):
                raise
            logger.warning(
                "The Hub cannot be reached (%s). Training goes on; uploads wait in %s and are tried again when it "
                "ends.", _words(error), self._outbox.folder,
            )  # fmt: skip
            return self._name

    def _repo(self) -> str:
        if self.repo is None:
            self.repo = self._client.make_repo(self._name, private=self._private, revision=self._revision)
        return self.repo

    def take_up(self) -> None:
        """Sends the pending uploads of earlier trainings in this directory."""
        self._outbox.clean()
        self._tidy()
        self.progress = PushInProgress([self._submit(upload) for upload in self._outbox.waiting()])

    def push_checkpoint(
        self, checkpoint: Path, *, strategy: str, message: str, step: int, when_there: WhenThere, starts: bool
    ) -> None:
        """Uploads the model of a checkpoint, by strategy all of it, once it is there (`starts`) or at the end."""
        path = file_selection.path_of_checkpoint(strategy, checkpoint)
        jobs: list[Job] = [Future() for _ in range(1 if path is None else 2)] if starts else []
        self.progress = self.progress if self.is_busy else PushInProgress()
        self.progress.jobs += jobs

        def ready(is_there: bool) -> None:
            uploads = self._stage(checkpoint, path, message=message, step=step) if is_there else []
            for job, upload in zip(jobs, uploads, strict=False):
                self._submit(upload, job)
            for job in jobs[len(uploads) :]:
                job.cancel()
            self._tidy()

        when_there(ready)

    def _stage(self, checkpoint: Path, path: str | None, *, message: str, step: int) -> list[Upload]:
        """Puts the files into the outbox, and those of the model beside the checkpoints too."""
        try:
            model = file_selection.model_files(checkpoint)
            ticket = Ticket(repo=self.repo, revision=self._revision, message=message, step=step)
            others = {name: file for name, file in file_selection.root_files(self._root).items() if name not in model}
            staged = [self._outbox.put(ticket, linked=model, copied=others)]
            if path is not None:
                words = f"{message}, checkpoint"
                whole = Ticket(repo=self.repo, path=path, revision=self._revision, message=words, step=step)
                staged.append(self._outbox.put(whole, linked=file_selection.files_below(checkpoint)))
            for name, file in model.items():
                target = self._root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with replacing(target) as partial:
                    shutil.copyfile(file, partial)
            return staged
        except Exception as error:
            logger.warning("Step %d cannot be prepared for the Hub: %s. Its checkpoint is in %s.", step, _words(error),
                           checkpoint)  # fmt: skip
            return []

    def _submit(self, upload: Upload, job: Job | None = None) -> Job:
        self._in_lane.add(upload.folder)
        return self._lane.submit(lambda: self._send(upload), job)

    def _tidy(self) -> None:
        """Removes pending uploads that a newer one to the same place replaces."""
        self._outbox.remove(one for one in superseded(self._outbox.waiting()) if one.folder not in self._in_lane)

    def _send(self, upload: Upload) -> object:
        """Uploads the files and removes them from the outbox; after a failure they stay."""
        ticket = upload.ticket
        try:
            with without_bars():
                repo = ticket.repo or self._repo()
                done = self._client.upload_folder(
                    repo, upload.root, message=ticket.message, path=ticket.path, revision=ticket.revision
                )
        except Exception as error:
            logger.warning("The upload of %r failed: %s. Training goes on; it is tried again when it ends.",
                           ticket.message, _words(error))  # fmt: skip
            self._tell(step=ticket.step, message=ticket.message, path=ticket.path, error=_words(error))
            raise
        finally:
            self._in_lane.discard(upload.folder)
        self._forget(ticket, before=upload.folder.name)
        self._outbox.remove([upload])
        self._tell(step=ticket.step, message=ticket.message, path=ticket.path, commit=getattr(done, "oid", None))
        return done

    def _forget(self, sent: Ticket, *, before: str) -> None:
        older = (one for one in self._outbox.waiting() if one.folder.name < before and is_over(one, sent))
        self._outbox.remove(one for one in older if one.folder not in self._in_lane)

    def push_root(self, message: str | None, *, client: HubClient | None = None, revision: str | None = None,
                  holds: bool = False, step: int = 0) -> Job:  # fmt: skip
        """Uploads the output directory, by a `client` with another token than the run's if there is one.

        `holds` keeps a copy until the Hub has it: training goes on meanwhile and changes the files.
        """
        revision = self._revision if revision is None else revision
        ticket = Ticket(repo=self.repo, revision=revision, message=message or "Upload model", step=step)
        if holds:
            return self._submit(self._outbox.put(ticket, linked={}, copied=file_selection.root_files(self._root)))
        now = f"{time.time_ns():020d}"

        def send() -> object:
            sender, ignored = client or self._client, file_selection.NOT_FROM_ROOT
            done = sender.upload_folder(
                self._repo(), self._root, message=ticket.message, revision=revision, ignored=ignored
            )
            self._forget(ticket, before=now)
            return done

        return self._lane.submit(send)

    def finish(self, *, unless: Callable[[], bool] = bool) -> list[Upload]:
        """Waits for uploads, makes up for failed ones, returns what the Hub lacks; at once when `unless` says so."""
        if self.is_busy:
            logger.info("Waiting for an upload to the Hub.")
            self.progress.wait_until_done(unless=unless)
        if not unless():
            self._tidy()
            for upload in self._outbox.waiting():
                job = self._submit(upload)
                self.progress = PushInProgress([job])
                if not self.progress.wait_until_done(unless=unless):
                    break
                error = job.exception()
                if error is not None and not is_permanent_error(error):
                    break  # it is away: it will be for the next one too
        left = self._outbox.waiting()
        if left:
            logger.warning("%s", listed(left, self._root))
        return left

    def abandon(self) -> None:
        """Stops waiting for uploads at the end of the process: pending ones stay in the outbox."""
        self._lane.abandon()


def listed(uploads: list[Upload], root: Path) -> str:
    """Returns the message about pending uploads."""
    lines = [f"  {upload.ticket.message!r} -> {upload.ticket.path or 'the root'} of {upload.ticket.repo or 'the '}"
             f"{'' if upload.ticket.repo else 'repository'}" for upload in uploads]  # fmt: skip
    return (
        f"The Hub does not have {len(uploads)} upload(s) yet; their files are in {root / '_uploads'}:\n"
        + "\n".join(lines)
        + f"\nSend them with `trainwright push {root}`; the next training with this output_dir does too."
    )


def _words(error: BaseException) -> str:
    """Returns an error in one line, with its cause; clients add lines of advice."""
    first = without_tokens((str(error).strip().splitlines() or [""])[0])
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return said if error.__cause__ is None else f"{said} ({_words(error.__cause__)})"
