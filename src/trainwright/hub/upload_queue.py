"""A lane: work that is done behind training's back, one thing at a time, in order. The process's end waits for it."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeAlias

LOOK_S = 0.1  # how often a wait asks whether it should end

Upload: TypeAlias = "Future[object]"


class PushInProgress:
    """Group of uploads, as `trainer.push_in_progress`.

    Attributes:
        jobs: a future for each.
    """

    def __init__(self, jobs: list[Upload] | None = None) -> None:
        self.jobs: list[Upload] = [] if jobs is None else jobs

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
        self._work: queue.SimpleQueue[tuple[Upload, Callable[[], object]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_left = 0
        self._thread: threading.Thread | None = None
        self._is_abandoned = False

    def submit(self, work: Callable[[], object], job: Upload | None = None) -> Upload:
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
