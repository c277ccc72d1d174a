"""Worker processes of a DataLoader: their signals, and their end with the main process."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess

from trainwright.data.bad_sample import Pipe, name_samples_of_worker
from trainwright.data.seeding import seed_worker

POLL_S = 1.0  # between two looks for the main process


def start_worker(worker_id: int, seeds: dict[str, int], stacks: Pipe | None = None) -> None:
    """Prepares a new worker: seeds it, and leaves signals to the main process, which still needs its batches.

    Args:
        worker_id: of torch's DataLoader.
        seeds: arguments of `seed_worker`; empty: the worker keeps torch's seed.
        stacks: where the worker writes its stack when it is signalled.
    """
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if stacks is not None and hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR2, file=stacks[1].fileno(), all_threads=False)
    main = multiprocessing.parent_process()
    if main is not None:
        threading.Thread(target=_end_with, args=(main, os.getppid()), name="trainwright-parent", daemon=True).start()
    name_samples_of_worker()
    if seeds:
        seed_worker(worker_id, **seeds)


def _end_with(main: BaseProcess, parent: int) -> None:
    """Ends this worker when the main process is gone: torch's looks for it only while a worker waits for indices.

    A worker that was started before others is told by the number of its parent: they keep its pipe to `main` open.
    """
    while main.is_alive() and os.getppid() == parent:
        main.join(POLL_S)
    os._exit(1)


GRACE_S = 0.5  # for children that end by themselves when the process does


@functools.cache
def end_workers_at_exit() -> None:
    """Kills workers that ignore SIGTERM when this process exits, which would wait for them without end.

    Registered later than multiprocessing's own hook, so it runs before that one, which terminates and joins them.
    """
    atexit.register(_end_children)


def _end_children() -> None:
    """Asks daemonic children to end, as multiprocessing would, and kills those that do not."""
    if hasattr(signal, "SIGCHLD"):
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises at the first one that is killed
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline = time.monotonic() + GRACE_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
