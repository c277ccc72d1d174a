"""Watchdog: a thread in each process that notices failed ranks, signals to other ranks, and a run without progress.

Ranks communicate through the store of the process group, never by a collective, so a step costs one counter. All ranks
end a run at the same step after a signal to any of them, although no rank knows how far the others are:

    Each rank counts the points that all ranks pass equally often (steps, batches of an evaluation). When a rank has
    published a signal, the watchdog of each rank closes a gate at the next point of its rank, and publishes the number
    of that point. When all have, rank 0 reads the numbers and publishes the largest, which is the point where all ranks
    end: no rank has passed it, because each one waits at its own gate until the largest number is known.

The store is one process's: ranks ask it less often the more they are, so that it never has more than
`MAX_REQUESTS_PER_S` questions a second while nothing has happened, and only one rank reads the entries of all.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainwright._types import counted
from trainwright.distributed.process_group import stay_in_the_group
from trainwright.errors import ProcessFailedError
from trainwright.state.interrupts import Interrupts
from trainwright.support.log_handler import for_log

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)

POLL_S = 0.2  # between two requests of a rank in a small world
MAX_REQUESTS_PER_S = 2000  # all ranks together; a store answers many times more
FRAME = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')  # of faulthandler
MOST_NAMED = 8  # ranks in one line
GRACE_S = 5.0  # for a process to end by itself when another one has failed
WAIT_FOR_GATES_S = 10.0
END_LIMIT_S = 10.0  # for the thread


class Watchdog:
    """Watchdog of one run in this process. Its thread runs until `close`."""

    def __init__(self, store: Store | None, *, rank: int, num_processes: int, hang_timeout_s: float) -> None:
        self._store = store  # view of the process group's store for this run; None for a single process
        self._rank = rank
        self._num_processes = num_processes
        self._poll_s = max(POLL_S, num_processes / MAX_REQUESTS_PER_S)
        self._hang_timeout_s = hang_timeout_s  # seconds without passing a point after which the run is ended; 0: never
        self._lock = threading.Lock()
        self._is_decided = threading.Event()
        self._is_done = threading.Event()
        self._passed = 0
        self._passed_at = time.monotonic()
        self._gate: int | None = None
        self._last: int | None = None  # the point where all ranks end
        self._signal: int | None = None
        self._is_published = False
        self._failed_at: float | None = None
        self.on_hang: Callable[[str], None] = lambda message: None  # called before a run without progress is ended
        self._thread = threading.Thread(target=self._run, name="trainwright-watchdog", daemon=True)
        self._thread.start()

    @property
    def is_shared(self) -> bool:
        """True if there are other ranks."""
        return self._store is not None

    # -- called by the thread that trains ------------------------------------------------------------------------

    def passes(self) -> int | None:
        """Counts a point that all ranks pass; returns the signal after which all ranks end there, if any."""
        with self._lock:
            self._passed += 1
            self._passed_at = time.monotonic()
            gate = self._gate
        if gate is None or self._passed < gate:
            return None
        if not self._is_decided.wait(WAIT_FOR_GATES_S + 3 * self._poll_s):
            return self._signal  # a rank is gone: the signal counts here and now
        return self._signal if self._last is not None and self._passed >= self._last else None

    def ask(self, number: int) -> None:
        """Notes the number of a signal to this process. Called in its handler, so the thread publishes it."""
        self._signal = number

    def fails(self, error: BaseException) -> str | None:
        """Publishes an error of this rank; returns the earlier error of another rank, if there is one."""
        if self._store is None or getattr(error, "is_everybodys", False):
            return None
        mine = f"Process {self._rank} failed:\n{''.join(traceback.format_exception(error))}"
        try:
            first = self._store.compare_set("failure", "", mine).decode()
            self._store.set("news", "failure")
        except RuntimeError:  # the store ended with the process that hosted it
            return "The process that kept the store is gone."
        return None if first == mine else first

    def close(self) -> None:
        """Ends the thread."""
        self._is_done.set()
        self._thread.join(END_LIMIT_S)  # it may wait for the store, whose process hangs

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_done.wait(self._poll_s):
            try:
                self._check_progress()
                if self._store is not None:
                    self._check_store(self._store)
            except RuntimeError:  # the host of the store has ended
                return

    def _check_store(self, store: Store) -> None:
        if self._signal is not None and not self._is_published:
            self._is_published = True
            store.compare_set("signal", "", str(int(self._signal)))  # an IntEnum's text is its name
            store.set("news", "signal")
        if not store.check(["news"]):
            return
        if not self._is_decided.is_set() and store.check(["signal"]):
            self._close_gate(store)
        if store.check(["standstill"]):
            self._give_up(store.get("standstill").decode())
        if store.check(["failure"]):  # this process waits in a collective operation that the failed rank never joins
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at > GRACE_S:
                _print(f"Process {self._rank} ends, because another one did.\n{store.get('failure').decode()}")
                os._exit(1)

    def _close_gate(self, store: Store) -> None:
        if self._gate is None:
            self._is_published = True
            self._signal = int(store.get("signal"))
            with self._lock:
                self._gate = self._passed + 1
            store.set(f"gate{self._rank}", str(self._gate))
            store.add("gates", 1)
        if self._rank == 0 and store.add("gates", 0) == self._num_processes and not store.check(["last"]):
            gates = [f"gate{rank}" for rank in range(self._num_processes)]
            store.set("last", str(max(map(int, _values(store, gates)))))
        if store.check(["last"]):
            self._last = int(store.get("last"))
            self._is_decided.set()

    def _check_progress(self) -> None:
        waited_s = time.monotonic() - self._passed_at
        if not self._hang_timeout_s or waited_s < self._hang_timeout_s:
            return
        message = (
            f"Process {self._rank} has finished no step and no batch of an evaluation for {waited_s:.0f} s "
            f"(hang_timeout={self._hang_timeout_s:g}). The stacks of every process follow; the run is given up."
        )
        if self._store is not None:
            self._store.compare_set("standstill", "", message)
            self._store.set("news", "standstill")
        self._give_up(message)

    def _give_up(self, message: str) -> None:
        if self._store is not None:
            place = f"{self._passed}|{_find_main_thread()} on {socket.gethostname()}"
            self._store.set(f"stands{self._rank}", place)
        _print(f"{message}\nStacks of process {self._rank}:")
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        self.on_hang(message)
        time.sleep(3 * self._poll_s)  # the others need to read of it before a launcher ends them
        if self._rank == 0 and self._store is not None:
            _print(self._standings(self._store))
        os._exit(1)

    def _standings(self, store: Store) -> str:
        """Lists the position of each process; first the processes that the others probably wait for."""
        keys = {f"stands{rank}": rank for rank in range(self._num_processes)}
        there = list(keys) if store.check(list(keys)) else [key for key in keys if store.check([key])]
        silent = [rank for key, rank in keys.items() if key not in set(there)]
        places: dict[tuple[int, str], list[int]] = {}
        for key, value in zip(there, _values(store, there), strict=True):
            passed, _, place = value.decode().partition("|")
            places.setdefault((int(passed), place), []).append(keys[key])
        lines = ["Where the processes stand (the others probably wait for the first):"]
        if silent:
            lines.append(f"    {_named(silent)}: no answer; gone, or stopped")
        furthest = max(number for number, _ in places)
        for (number, place), ranks in sorted(places.items(), key=lambda item: (item[0][0], len(item[1]), item[1])):
            behind = f", {counted(furthest - number, 'step')} behind" if number < furthest else ""
            lines.append(f"    {_named(ranks)}: {place}{behind}")
        return "\n".join(lines)


def _named(ranks: list[int]) -> str:
    """Returns "process 3", or the first of several."""
    if len(ranks) == 1:
        return f"process {ranks[0]}"
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"processes {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def _find_main_thread() -> str:
    """Returns the innermost function of the main thread, as `training_step (train.py, line 40)`."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        lines = iter(file.read().splitlines())
    main = f"{threading.main_thread().ident:#018x}"
    next((line for line in lines if "hread " in line and main in line), None)
    found = FRAME.match(next(lines, ""))
    return "an unknown place" if found is None else f"{found[3]} ({os.path.basename(found[1])}, line {found[2]})"


def start_watchdog(*, hang_timeout_s: float, run: int) -> Watchdog | None:
    """Starts the watchdog of a run, which has the same number in all processes.

    Returns:
        The watchdog; if the store of the group cannot be shared with its thread, it watches this process
        alone. None without a time limit.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, get_rank, get_world_size

    store: Any = _get_default_store()  # its `clone` has no type
    try:
        view = PrefixStore(f"trainwright/{run}", store.clone())
    except (AttributeError, NotImplementedError, RuntimeError):
        _warn_missing_store(type(store).__name__)
        if not hang_timeout_s:
            return None
        return Watchdog(None, rank=get_rank(), num_processes=1, hang_timeout_s=hang_timeout_s)
    return Watchdog(view, rank=get_rank(), num_processes=get_world_size(), hang_timeout_s=hang_timeout_s)


@functools.cache
def _warn_missing_store(kind: str) -> None:
    """Warns once for each kind of store in a process."""
    logger.warning(
        "The store of the process group (%s) cannot be cloned, so a signal to another process or its failure is not "
        "noticed here; hang_timeout looks at this process alone. Start the group with a TCPStore, as torchrun does.",
        kind,
    )


def _values(store: Store, keys: list[str]) -> list[bytes]:
    """Returns the values of keys that exist, by one request if the store can do that."""
    reads: Any = store  # `has_extended_api` has no type
    return reads.multi_get(keys) if reads.has_extended_api() else [store.get(key) for key in keys]


@contextmanager
def watched(watchdog: Watchdog, interrupts: Interrupts) -> Iterator[None]:
    """Connects a watchdog to the work that counts its points; ProcessFailedError where another rank failed first."""
    interrupts.meeting = watchdog
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if interrupts.received is None:  # otherwise all ranks end together
            stay_in_the_group()
            raise_first(watchdog, error)
        raise
    finally:
        interrupts.meeting = None
        watchdog.close()


def raise_first(watchdog: Watchdog, error: BaseException) -> None:
    """Publishes an error of this process; raises ProcessFailedError with the traceback if another failed first."""
    first = watchdog.fails(error)
    if first is not None:
        raise ProcessFailedError(
            f"Another process failed first, and this one cannot continue alone.\n{first}"
        ) from None


@contextmanager
def watch_single_process(hang_timeout_s: float, interrupts: Interrupts) -> Iterator[None]:
    """Watches the only process of a run, if a time limit is set (not 0) and nothing watches it yet."""
    if not hang_timeout_s or interrupts.meeting is not None:
        yield
        return
    with watched(Watchdog(None, rank=0, num_processes=1, hang_timeout_s=hang_timeout_s), interrupts):
        yield


def _print(text: str) -> None:
    print(for_log(text), file=sys.__stderr__ or sys.stderr, flush=True)
