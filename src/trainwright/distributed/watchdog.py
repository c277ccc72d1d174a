"""Watch: a thread beside the work of each process. It hears of failures and signals elsewhere, and of a standstill.

Processes talk through the process group's store, never by a collective, so a step costs nothing but a count. How a
signal to one process ends all at the same place, without anybody knowing how far the others are:

    Every process counts the places that all pass equally often (steps, batches of an evaluation). Once a signal is
    proposed, each process's watch closes a gate at the next place to come and says which one that is. When all have
    said so, all know the furthest gate, and that is where everybody stops: nobody has passed it, since each one waits
    at its own gate until the furthest is known.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.distributed.process_group import stay_in_the_group
from trainwright.errors import ProcessFailedError
from trainwright.state.interrupts import Interrupts

POLL_S = 0.2
GRACE_S = 5.0  # for a process to end by itself when another one has failed
WAIT_FOR_GATES_S = 10.0


class Watchdog:
    """The watch over one run in this process.

    Args:
        store: a view of the store for this run alone (torch.distributed's); None where this is the only process.
        hang_timeout_s: so long without passing a place is a standstill; 0: never.
    """

    def __init__(self, store: Any, *, rank: int, num_processes: int, hang_timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._num_processes = num_processes
        self._hang_timeout_s = hang_timeout_s
        self._lock = threading.Lock()
        self._passed = 0
        self._passed_at = time.monotonic()
        self._gate: int | None = None
        self._last: int | None = None  # the place where everybody stops
        self._is_decided = threading.Event()
        self._signal: int | None = None
        self._is_proposed = False
        self._failed_at: float | None = None
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainwright-watch", daemon=True)
        self._thread.start()

    @property
    def is_shared(self) -> bool:
        return self._store is not None

    # -- asked by the work ---------------------------------------------------------------------------------------

    def passes(self) -> int | None:
        """Called at each place that all processes pass; returns the signal by which all of them end here."""
        with self._lock:
            self._passed += 1
            self._passed_at = time.monotonic()
            gate = self._gate
        if gate is None or self._passed < gate:
            return None
        if not self._is_decided.wait(WAIT_FOR_GATES_S):  # somebody is gone: the signal counts here and now
            return self._signal
        return self._signal if self._last is not None and self._passed >= self._last else None

    def ask(self, number: int) -> None:
        """A signal arrived here. Called from its handler, so it only takes note."""
        self._signal = number

    def fails(self, error: BaseException) -> str | None:
        """Tells the others of an error; returns what failed before it elsewhere, if something did."""
        if self._store is None or getattr(error, "is_everybodys", False):
            return None
        text = "".join(traceback.format_exception(error))
        mine = f"Process {self._rank} failed:\n{text}"
        try:
            first = self._store.compare_set("failure", "", mine).decode()
            self._store.set("news", "failure")
        except RuntimeError:  # the store went with the process that kept it
            return "The process that kept the store is gone."
        return None if first == mine else str(first)

    def close(self) -> None:
        self._is_done.set()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_done.wait(POLL_S):
            try:
                self._look_at_the_clock()
                if self._store is not None:
                    self._look_at_the_store()
            except RuntimeError:  # the store's keeper has ended; what it said before is known
                return

    def _look_at_the_store(self) -> None:
        store = self._store
        if self._signal is not None and not self._is_proposed:
            self._is_proposed = True
            store.compare_set("signal", "", str(self._signal))
            store.set("news", "signal")
        if not store.check(["news"]):
            return
        if not self._is_decided.is_set() and store.check(["signal"]):
            self._close_gate()
        if store.check(["standstill"]):
            self._give_up(store.get("standstill").decode())
        if store.check(["failure"]):
            self._leave_after_grace(store.get("failure").decode())

    def _close_gate(self) -> None:
        if self._gate is None:
            self._is_proposed = True
            self._signal = int(self._store.get("signal"))
            with self._lock:
                self._gate = self._passed + 1
            self._store.set(f"gate{self._rank}", str(self._gate))
        gates = [f"gate{rank}" for rank in range(self._num_processes)]
        if self._store.check(gates):
            self._last = max(int(self._store.get(gate)) for gate in gates)
            self._is_decided.set()

    def _leave_after_grace(self, failure: str) -> None:
        """The work stands in a collective operation that nobody will join any more: it cannot be told, only ended."""
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > GRACE_S:
            _say(f"Process {self._rank} ends, because another one did.\n{failure}")
            os._exit(1)

    def _look_at_the_clock(self) -> None:
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
        _say(f"{message}\nStacks of process {self._rank}:")
        faulthandler.dump_traceback(file=_stderr(), all_threads=True)
        time.sleep(3 * POLL_S)  # the others need to hear of it before a launcher ends them
        os._exit(1)


def start_watchdog(*, rank: int, num_processes: int, hang_timeout_s: float, run: int) -> Watchdog:
    """The watch over the run of this number, in several processes."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store: Any = _get_default_store()
    return Watchdog(
        PrefixStore(f"trainwright/{run}", store.clone()),
        rank=rank,
        num_processes=num_processes,
        hang_timeout_s=hang_timeout_s,
    )


@contextmanager
def active_watchdog(watch: Watchdog, interrupts: Interrupts) -> Iterator[None]:
    """Around the work: counts its places, and tells the others when it fails."""
    interrupts.meeting = watch
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if interrupts.received is None:  # otherwise all leave together
            stay_in_the_group()
            raise_first(watch, error)
        raise
    finally:
        interrupts.meeting = None
        watch.close()


def raise_first(watch: Watchdog, error: BaseException) -> None:
    """Tells the others of an error, and raises what failed first where this one only followed from it."""
    first = watch.fails(error)
    if first is not None:
        raise ProcessFailedError(f"Another process failed first, and this one cannot go on alone.\n{first}") from None


def _say(text: str) -> None:
    print(text, file=_stderr(), flush=True)


def _stderr() -> Any:
    return sys.__stderr__ or sys.stderr


@contextmanager
def watch_single_process(hang_timeout_s: float, interrupts: Interrupts) -> Iterator[None]:
    """The watch of a process without others, where one is asked for and none stands yet."""
    if not hang_timeout_s or interrupts.meeting is not None:
        yield
        return
    with active_watchdog(Watchdog(None, rank=0, num_processes=1, hang_timeout_s=hang_timeout_s), interrupts):
        yield
