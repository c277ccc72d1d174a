"""Whoever evaluates for a run: a child process of its main process, or processes that watch its directory.

A thread speaks to them, so a step reads no file and does not wait.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trainwright._types import JSONObject
from trainwright.capabilities.async_evaluation.requests import (
    MAX_BYTES,
    SIGNS,
    WATCHER_GONE_S,
    EvaluationRequest,
    Requests,
    Result,
)
from trainwright.support.child_process import ChildProcess

logger = logging.getLogger(__name__)

NUM_TRIES = 2  # attempts at an evaluation if its process dies
LOOKS_EVERY_S = 0.2  # for results of other machines, and for the end of a process
EVALUATION_LIMIT_S = 6 * 3600.0  # for a batch, or the metrics after the last one; or hang_timeout
START_LIMIT_S = 1800.0  # for a process that imports the user's code and reads model and data
STOP_LIMIT_S = 10.0  # for the end of a process that was killed, and of a thread


class Evaluator(Protocol):
    """Evaluates requests, one after the other or several at a time."""

    def start(self) -> None:
        """Begins, without waiting."""

    def find_problem(self, seconds: float) -> str | None:
        """Waits until it can evaluate, with a time limit.

        Returns why it never will, "" if all is well, None if that is not known yet.
        """

    def submit(self, request: EvaluationRequest) -> None:
        """Takes a complete request."""

    def take(self) -> list[tuple[str, Result]]:
        """Returns the results since the last call, with the names of their requests."""

    def wait(self, seconds: float) -> None:
        """Waits for a result that was not taken, with a time limit."""

    @property
    def num_open(self) -> int:
        """Number of requests without a result."""

    @property
    def is_gone(self) -> bool:
        """Returns True if no process evaluates."""

    def stop(self) -> None:
        """Ends, also in the middle of an evaluation."""


class Arrivals:
    """Results on their way from the thread that speaks to an evaluator to the training loop."""

    def __init__(self) -> None:
        self._results: deque[tuple[str, Result]] = deque()
        self._news = threading.Event()

    def put(self, name: str, result: Result) -> None:
        """Adds the result of a request."""
        self._results.append((name, result))
        self._news.set()

    def take(self) -> list[tuple[str, Result]]:
        """Returns the results that have come, and removes them."""
        if not self._news.is_set():
            return []
        self._news.clear()
        return [self._results.popleft() for _ in range(len(self._results))]

    def wait(self, seconds: float) -> None:
        """Waits for a result."""
        self._news.wait(seconds)


class EvaluationProcess:
    """A child process, started again if it dies.

    It reads the names of requests from its standard input, a line each, and answers with JSON lines on its standard
    output: `{"ready": true}` once, then `{"done": name}` or `{"failed": traceback}` for each request, and
    `{"alive": true}` while it evaluates batches. It ends when its standard input does. It leads a group of processes
    (workers of its dataloaders, children of metrics), which are ended with it; its end is seen even if one of them
    still holds its pipes.

    Args:
        command: starts it.
        environment: its variables.
        scratch: directory with the files it reads when it starts; deleted in the end.
        requests: of the run.
        limit_s: seconds without a batch or a result after which it counts as hanging.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        scratch: Path,
        requests: Requests,
        limit_s: float = EVALUATION_LIMIT_S,
    ) -> None:
        self._limit_s = limit_s
        self._command = command
        self._environment = environment
        self._scratch = scratch
        self._requests = requests
        self._waiting: queue.SimpleQueue[EvaluationRequest | None] = queue.SimpleQueue()
        self._arrivals = Arrivals()
        self._num_submitted = 0  # written by the training loop
        self._num_done = 0  # written by the thread
        self._is_ready = threading.Event()
        self._problem: str | None = None
        self._ends = False
        self._process: ChildProcess | None = None
        self._lock = threading.Lock()  # a process is not started while the run ends
        self._thread = threading.Thread(target=self._work, name="trainwright-evaluation", daemon=True)

    # -- for the training loop -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process, without waiting."""
        self._thread.start()

    def find_problem(self, seconds: float) -> str | None:
        """Waits until the process has read the trainer, with a time limit."""
        return (self._problem or "") if self._is_ready.wait(seconds) else None

    def submit(self, request: EvaluationRequest) -> None:
        """Takes a complete request."""
        self._num_submitted += 1
        self._waiting.put(request)

    def take(self) -> list[tuple[str, Result]]:
        """Returns the results that have come since the last call."""
        return self._arrivals.take()

    def wait(self, seconds: float) -> None:
        """Waits until a result comes."""
        self._arrivals.wait(seconds)

    @property
    def num_open(self) -> int:
        """Number of requests without a result."""
        return self._num_submitted - self._num_done

    @property
    def is_gone(self) -> bool:
        """False: a process that died is started again."""
        return False

    def stop(self) -> None:
        """Ends the process and the thread."""
        self._ends = True
        with self._lock:
            process = self._process
        if process is not None:
            process.end_group()
        self._waiting.put(None)
        if self._thread.ident is not None:
            self._thread.join(STOP_LIMIT_S)
        shutil.rmtree(self._scratch, ignore_errors=True)

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._problem = self._begin()
        except BaseException as error:  # whatever it is, the run waits for an answer
            self._problem = repr(error)
        self._is_ready.set()
        while (request := self._waiting.get()) is not None and not self._ends:
            try:
                result = self._evaluated(request)
            except BaseException as error:  # the thread must not end: the run waits for its results
                result = Result(missing=repr(error))
            if self._ends:
                break
            self._num_done += 1
            self._arrivals.put(request.name, result)
        self._put_away()

    def _evaluated(self, request: EvaluationRequest) -> Result:
        """Has a request evaluated; if the process dies, in a new one."""
        ended = ""
        for number in range(1, NUM_TRIES + 1):
            problem = None if self._is_alive() else self._begin_again(is_told=number > 1)
            answer = self._ask(request.name) if problem is None else None
            if self._ends:
                return Result(missing="the run has ended")
            if answer is not None:
                return self._read(request, answer)
            ended = problem or self._describe_end()
            again = ", and is made again in a new one" if number < NUM_TRIES else ""
            logger.warning("The evaluation of step %d was lost: %s%s.", request.step, ended, again)
        return Result(missing=f"{ended}, {NUM_TRIES} times")

    def _read(self, request: EvaluationRequest, answer: JSONObject) -> Result:
        if "failed" in answer:
            return Result(error=str(answer["failed"]))
        try:
            result = Result.read(self._requests.place(request.name))
        except (OSError, ValueError) as error:
            return Result(missing=str(error))
        return Result(missing="its result is not there") if result is None else result

    def _begin(self) -> str | None:
        """Starts the process and waits until it is ready; returns a problem."""
        self._put_away()
        with self._lock:
            if self._ends:
                return "the run has ended"
            try:
                self._process = ChildProcess(self._command, self._environment, max_bytes=MAX_BYTES)
            except OSError as error:
                return f"its process cannot be started: {error}"
        answer = self._next_answer(limit_s=START_LIMIT_S)
        if answer is None:
            if not self._process.has_ended():
                self._put_away()
                return f"its process has not read the trainer after {START_LIMIT_S:g} s"
            return f"its process ended with {self._process.describe_end()} when it was started"
        return str(answer["failed"]) if "failed" in answer else None

    def _begin_again(self, *, is_told: bool) -> str | None:
        """Starts a new process, and warns of the death of the last one unless the caller has."""
        if self._process is not None and not is_told:
            end = self._process.describe_end()
            logger.warning("The process that evaluates ended with %s; it is started again.", end)
        return self._begin()

    def _is_alive(self) -> bool:
        return self._process is not None and not self._process.has_ended()

    def _ask(self, name: str) -> JSONObject | None:
        """Returns the answer to a request; None if the process dies."""
        assert self._process is not None
        if not self._process.write(name):
            return None
        return self._next_answer(limit_s=self._limit_s)

    def _next_answer(self, *, limit_s: float) -> JSONObject | None:
        """Returns the next answer; None if the process ends, hangs, or answers something else.

        An evaluation may take as long as it does, but each of its batches has a limit.
        """
        process = self._process
        assert process is not None
        while True:
            answer = process.next_line(limit_s, is_over=lambda: self._ends)
            if answer is None or "alive" not in answer:
                return answer

    def _describe_end(self) -> str:
        """Ends the process that gave no answer; returns why it gave none."""
        assert self._process is not None
        hangs = self._process.is_silent
        end = self._process.describe_end()
        return (
            f"its process has finished no batch for {self._limit_s:g} s" if hangs else f"its process ended with {end}"
        )

    def _put_away(self) -> None:
        """Ends the process, if there is one, and closes its pipes."""
        process = self._process
        if process is not None:
            process.close()
            self._process = None


class Watchers:
    """Processes that watch the run, on any machine with its directory (`trainwright eval --watch`).

    Args:
        requests: of the run.
        clock: seconds.
    """

    def __init__(self, requests: Requests, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._clock = clock
        self._arrivals = Arrivals()
        self._waiting: dict[str, EvaluationRequest] = {}
        self._ends = threading.Event()
        self._signs: dict[str, float] = {}  # file of a watcher -> when it was written, by its machine's clock
        self._seen = clock()  # when a watcher gave a sign of life; one may start together with the run
        self._thread = threading.Thread(target=self._look, name="trainwright-evaluation", daemon=True)

    def start(self) -> None:
        """Begins to look for results."""
        self._thread.start()

    def find_problem(self, seconds: float) -> str | None:
        """Returns "": a watcher may come at any time."""
        return ""

    def submit(self, request: EvaluationRequest) -> None:
        """Takes a complete request."""
        self._waiting[request.name] = request

    def take(self) -> list[tuple[str, Result]]:
        """Returns the results that have come since the last call."""
        return self._arrivals.take()

    def wait(self, seconds: float) -> None:
        """Waits until a result comes."""
        self._arrivals.wait(seconds)

    @property
    def num_open(self) -> int:
        """Number of requests without a result."""
        return len(self._waiting)

    @property
    def is_gone(self) -> bool:
        """Returns True if no watcher has given a sign of life for a minute."""
        return self._clock() - self._seen > WATCHER_GONE_S

    def stop(self) -> None:
        """Ends the thread."""
        self._ends.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_LIMIT_S)

    def _look(self) -> None:
        while not self._ends.wait(LOOKS_EVERY_S):
            self._look_for_watchers()
            for name, request in list(self._waiting.items()):
                try:
                    result = Result.read(self._requests.place(name))
                except (OSError, ValueError) as error:
                    result = Result(missing=str(error))
                if result is not None:
                    self._waiting.pop(name)
                    self._arrivals.put(request.name, result)

    def _look_for_watchers(self) -> None:
        signs: dict[str, float] = {}
        for path in self._requests.folder.glob(SIGNS):
            try:
                signs[path.name] = path.stat().st_mtime
            except OSError:
                continue
        if signs and any(self._signs.get(name) != written for name, written in signs.items()):
            self._seen = self._clock()
        self._signs = signs
