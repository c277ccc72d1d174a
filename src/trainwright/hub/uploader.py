"""Uploader: files to upload, the time to do so, and the handling of a failed upload. It never stops or delays training.

Every upload waits in the outbox until the Hub has it, and one upload runs at a time. When training ends, the uploader
sends the saves made in the meantime and the failed uploads, only the newest for each destination. Uploads that still
fail wait for the next training in the same directory, or for `trainwright push`.
"""

from __future__ import annotations

import atexit
import glob
import logging
import math
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from trainwright._types import counted, without_tokens
from trainwright.config.coerce import output_path
from trainwright.config.protocol import Arguments
from trainwright.hub import outbox
from trainwright.hub.access import without_retries
from trainwright.hub.outbox import Outbox, Ticket, Upload, is_over
from trainwright.journal.record import JournalListener
from trainwright.state.trainer_state import TrainerState
from trainwright.support.door import COPY_BYTES, OwnFolder, RelativeName
from trainwright.support.units import duration_text

logger = logging.getLogger(__name__)

LIBRARY = "trainwright"  # as the Hub counts its callers
END_LIMIT_S = 600.0  # of waiting for uploads when a training ends
SLOW_BYTES_PER_S = 1e6  # and for their size
LOOK_S = 0.1  # how often a wait asks whether it should end

Job: TypeAlias = "Future[object]"


@dataclass
class PushInProgress:
    """Group of uploads, as `trainer.push_in_progress`."""

    jobs: list[Job] = field(default_factory=list)  # a future for each

    def is_done(self) -> bool:
        return all(job.done() for job in self.jobs)

    def wait_until_done(self, *, unless: Callable[[], bool] = bool, seconds: float = math.inf) -> bool:
        """Waits for all of them; returns False as soon as `unless` says so, or when time is over."""
        end = time.monotonic() + seconds
        while not self.is_done():
            if unless() or time.monotonic() >= end:
                return False
            futures.wait(self.jobs, timeout=LOOK_S)
        return True

    def cancel(self) -> None:
        """Cancels uploads that have not begun; others continue."""
        self.jobs = [job for job in self.jobs if not (job.cancel() or job.done())]


class UploadQueue:
    """Runs work on a thread that ends when there is no more work."""

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


WhenThere = Callable[[Callable[[bool], None]], None]  # calls back when a checkpoint is there, or never will be


class Uploader:
    """Uploads one output directory to one repository (`name`, with or without owner), in the main process only.

    `tell` is called for the journal with the step, the destination and the result of each upload.
    """

    def __init__(
        self,
        root: str | Path,
        name: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        tell: Callable[..., None] = lambda **values: None,
    ) -> None:
        self.repo: str | None = None  # full name of the repository, once the Hub has answered
        self.progress = PushInProgress()  # the uploads under way
        self.in_progress: PushInProgress | None = None  # uploads of the last checkpoint; None before the first
        self._root = Path(root)
        self._name = name
        self._api = HfApi(library_name=LIBRARY, token=token)
        self._private = private
        self._revision = revision
        self._outbox = Outbox(root)
        self._lane = UploadQueue()
        self._tell = tell
        self._in_lane: set[Path] = set()
        self._failed: set[Path] = set()  # uploads with a logged failure
        self._left: list[Upload] = []  # uploads already reported as missing on the Hub

    @property
    def model_name(self) -> str:
        """Name of the repository without its owner."""
        return self._name.rpartition("/")[2]

    @classmethod
    def for_arguments(
        cls, args: Arguments, keeper: JournalListener, *, token: str | None, private: bool | None
    ) -> Uploader:
        """Returns the uploader of a trainer; `token` and `private` win over the arguments."""
        return cls(
            output_path(args),
            outbox.repo_name(args),
            token=args.hub_token if token is None else token,
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision,
            tell=lambda **values: keeper.journal.write("push", **values),
        )

    @property
    def is_busy(self) -> bool:
        return not self.progress.is_done()

    def open(self) -> str:
        """Makes the repository; returns its name (short if the Hub is not asked), or raises if the Hub refuses."""
        try:
            return self._repo()
        except Exception as error:
            if is_permanent_error(error):
                raise
            logger.warning(
                "The Hub cannot be reached (%s). Training continues; uploads wait in %s and are tried again when it "
                "ends.",
                in_a_line(error),
                self._outbox.folder,
            )
            return self._name

    def _repo(self) -> str:
        """Returns the full name of the repository; makes it and the named branch unless they exist."""
        if self.repo is None:
            repo = str(self._api.create_repo(self._name, private=self._private, exist_ok=True).repo_id)
            if self._revision not in (None, "main") and not str(self._revision).startswith("refs/"):
                self._api.create_branch(repo, branch=str(self._revision), exist_ok=True)
            self.repo = repo
        return self.repo

    def take_up(self) -> None:
        """Sends the pending uploads of earlier trainings in this directory, when a training begins."""
        self._outbox.clean()
        self._tidy()
        self.progress = PushInProgress([self._submit(upload) for upload in self._outbox.waiting()])

    def push_checkpoint(
        self,
        checkpoint: Path,
        args: Arguments,
        state: TrainerState,
        *,
        when_there: WhenThere,
        announce: Callable[[], None],
    ) -> None:
        """Uploads the model of a checkpoint, by `hub_strategy` all of it, asynchronously, one at a time.

        `when_there` calls its argument when the checkpoint is on disk; `announce` is called if the upload starts now.
        """
        strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
        if strategy == "end":
            return
        starts = args.hub_always_push or not self.is_busy
        if starts:
            announce()
        path = {"checkpoint": "last-checkpoint", "all_checkpoints": checkpoint.name}.get(strategy)
        by_steps = getattr(args.save_strategy, "value", args.save_strategy) == "steps"
        step = state.global_step
        message = f"Training in progress, {f'step {step}' if by_steps else f'epoch {int(state.epoch)}'}"
        jobs: list[Job] = [Future() for _ in range(1 if path is None else 2)] if starts else []
        self.in_progress = self.progress = self.progress if self.is_busy else PushInProgress()
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
        """Puts the files into the outbox, and copies the files of the model into the output directory."""
        try:
            model = outbox.files_below(checkpoint, without=outbox.NOT_OF_THE_MODEL)
            ticket = Ticket(repo=self.repo, revision=self._revision, message=message, step=step)
            others = {name: file for name, file in outbox.root_files(self._root).items() if name not in model}
            staged = [self._outbox.put(ticket, linked=model, copied=others)]
            if path is not None:
                whole = replace(ticket, path=path, message=f"{message}, checkpoint")
                staged.append(self._outbox.put(whole, linked=outbox.files_below(checkpoint)))
            own = OwnFolder(self._root)
            for name, file in model.items():
                with file.open("rb") as content, own.replacing(RelativeName.parse(name)) as target:
                    shutil.copyfileobj(content, target, COPY_BYTES)
            return staged
        except Exception as error:
            logger.warning(
                "Step %d cannot be prepared for the Hub: %s. Its checkpoint is in %s.",
                step,
                in_a_line(error),
                checkpoint,
            )
            return []

    def _submit(self, upload: Upload, job: Job | None = None) -> Job:
        self._in_lane.add(upload.folder)
        return self._lane.submit(lambda: self._send(upload), job)

    def _tidy(self) -> None:
        """Removes pending uploads that a newer one to the same place replaces."""
        waiting = self._outbox.waiting()
        old = [one for i, one in enumerate(waiting) if any(is_over(one, later.ticket) for later in waiting[i + 1 :])]
        self._outbox.remove(one for one in old if one.folder not in self._in_lane)

    def _send(self, upload: Upload) -> object:
        """Uploads the files and removes them from the outbox; after a failure they stay."""
        ticket = upload.ticket
        about = {"step": ticket.step, "message": ticket.message, "path": ticket.path}
        try:
            with without_bars(), without_retries():
                done = self._upload(self._api, upload.root, ticket)
        except Exception as error:
            words = in_a_line(error)
            note = "The upload of %r failed: %s. Its files wait in %s and are sent again."
            if upload.folder not in self._failed:  # once
                logger.warning(note, ticket.message, words, self._outbox.folder)
            self._failed.add(upload.folder)
            self._tell(**about, error=words)
            raise
        finally:
            self._in_lane.discard(upload.folder)
        self._forget(ticket, before=upload.folder.name)
        self._outbox.remove([upload])
        self._tell(**about, commit=getattr(done, "oid", None))
        return done

    def _upload(self, api: HfApi, folder: Path, ticket: Ticket, *, ignored: Sequence[str] = ()) -> object:
        """Uploads a directory as one commit, by `HfApi.upload_folder` as transformers does, where libraries wrap it."""
        return api.upload_folder(
            repo_id=ticket.repo or self._repo(),
            folder_path=str(folder),
            path_in_repo=ticket.path or None,
            commit_message=ticket.message,
            token=api.token,
            ignore_patterns=list(ignored) or None,
            revision=ticket.revision,
        )

    def _forget(self, sent: Ticket, *, before: str) -> None:
        older = (one for one in self._outbox.waiting() if one.folder.name < before and is_over(one, sent))
        self._outbox.remove(one for one in older if one.folder not in self._in_lane)

    def push_root(
        self, message: str | None, *, token: str | None, revision: str | None, is_training: bool, step: int
    ) -> Job:
        """Uploads the output directory, as a copy while it is trained, since training changes the files meanwhile."""
        revision = self._revision if revision is None else revision
        ticket = Ticket(repo=self.repo, revision=revision, message=message or "Upload model", step=step)
        if is_training:
            return self._submit(self._outbox.put(ticket, linked={}, copied=outbox.root_files(self._root)))
        now = f"{time.time_ns():020d}"
        links = [glob.escape(name) for name in outbox.links_out(self._root)]

        def send() -> object:
            api = self._api if token is None else HfApi(library_name=LIBRARY, token=token)
            try:
                with without_bars(), without_retries():
                    done = self._upload(api, self._root, ticket, ignored=(*outbox.NOT_FROM_ROOT, *links))
            except Exception:  # `trainwright push` sends it then
                self._outbox.put(ticket, linked={}, copied=outbox.root_files(self._root))
                self._tidy()
                raise
            self._forget(ticket, before=now)
            return done

        return self._lane.submit(send)

    def finish(self, *, unless: Callable[[], bool] = bool) -> list[Upload]:
        """Waits for uploads, makes up for failed ones, returns the missing ones; at once when `unless` says so."""
        if self.is_busy:
            logger.info("Waiting for an upload to the Hub.")
            self._wait(unless)
        if not unless() and not self.is_busy:
            self._tidy()
            for upload in self._outbox.waiting():
                job = self._submit(upload)
                self.progress = PushInProgress([job])
                if not self._wait(unless):
                    break
                error = job.exception()
                if error is not None and not is_permanent_error(error):
                    break  # it is away: it will be for the next one too
        left = self._outbox.waiting()
        if left and left != self._left:
            self._left = left
            lines = [
                f"  {ticket.message!r} -> {ticket.path or 'the root'} of {ticket.repo or 'the repository'}"
                for ticket in (upload.ticket for upload in left)
            ]
            logger.warning(
                "The Hub does not have %s yet; the files are in %s:\n%s\nSend them with `trainwright push "
                "%s`; the next training with this output_dir does too.",
                counted(len(left), "upload"),
                self._outbox.folder,
                "\n".join(lines),
                self._root,
            )
        return left

    def _wait(self, unless: Callable[[], bool]) -> bool:
        """Waits for the uploads under way, for as long as a slow line needs; those that hang stay in the outbox."""
        limit_s = END_LIMIT_S + self._outbox.size() / SLOW_BYTES_PER_S
        is_done = self.progress.wait_until_done(unless=unless, seconds=limit_s)
        if not is_done and not unless():
            logger.warning("The Hub has not answered for %s: its uploads are left.", duration_text(limit_s))
            self._lane.abandon()
        return is_done

    def abandon_after(self, error: BaseException) -> None:
        """Lets the process end without waiting if a signal ended a training: pending uploads stay in the outbox."""
        if not isinstance(error, Exception):
            self._lane.abandon()


def is_permanent_error(error: BaseException) -> bool:
    """Returns True if a retry is useless: the service refused, or the name is invalid."""
    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", 500)
        return 400 <= status < 500 and status not in (408, 409, 412, 425, 429)
    return isinstance(error, ValueError)


@contextmanager
def without_bars() -> Iterator[None]:
    """Hides the client's progress bars, which would be drawn over the training's."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def in_a_line(error: BaseException) -> str:
    """Returns an error in one line, with its cause if it says more; clients add lines of advice."""
    first = without_tokens((str(error).strip().splitlines() or [""])[0])
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    cause = None if error.__cause__ is None else in_a_line(error.__cause__)
    return said if cause in (None, said) else f"{said} ({cause})"
