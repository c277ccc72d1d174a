"""The process that evaluates for a run: it reads the trainer of the run, and carries out the run's requests.

`python -m trainwright.run.thaw` calls `main` with FILE and PID: the parent process PID has written a trainer to FILE,
and names requests on standard input (`evaluators.py`). It is the trainer of the run without optimizer and training
data: hooks, metrics and data are the user's, and it computes as the run does.
"""

from __future__ import annotations

import math
import queue
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from trainwright.callbacks.base import NO_LOGS, Logs, TrainerCallback
from trainwright.capabilities.async_evaluation.requests import (
    EVALUATE,
    LOG,
    MAIN_PART,
    STATES_NAME,
    EvaluationRequest,
    Requests,
    Result,
)
from trainwright.checkpoint import rng
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError, ProcessFailedError
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support.child_process import ParentPipes, end_own_group, ignore_signals

AnyTrainer = Any  # a Trainer, or a subclass of the user's: the class is above this package

SIGNS_EVERY_S = 1.0  # that batches are evaluated


class Thaw(Protocol):
    """Reads a frozen trainer: `run.thaw.thaw`, which is above this package."""

    def __call__(self, path: Path, *, device_argument: str) -> AbstractContextManager[tuple[AnyTrainer, str]]: ...


class EventRecorder(TrainerCallback):
    """Keeps the logs and the ends of evaluations in their order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, logs: Logs = NO_LOGS, **kwargs: object
    ) -> None:
        """Keeps a log."""
        self.events.append((LOG, dict(logs)))

    def on_evaluate(
        self, args: Arguments, state: TrainerState, control: TrainerControl, metrics: Logs = NO_LOGS, **kwargs: object
    ) -> None:
        """Keeps the metrics of one evaluation set."""
        self.events.append((EVALUATE, dict(metrics)))


class SignsOfLife(TrainerCallback):
    """Calls a function while batches are evaluated, at most once a second."""

    def __init__(self, give: Callable[[], object]) -> None:
        self._give = give
        self._last = -math.inf

    def on_prediction_step(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Gives a sign after a batch."""
        now = time.monotonic()
        if now - self._last >= SIGNS_EVERY_S:
            self._last = now
            self._give()


class RequestedEvaluation:
    """Evaluates the requests of a run.

    Args:
        trainer: of the run, without the parts that only training needs.
        requests: of the run.
        sign: called while batches are evaluated.
    """

    def __init__(self, trainer: AnyTrainer, requests: Requests, *, sign: Callable[[], object] = bool) -> None:
        self._trainer = trainer
        self._requests = requests
        self._signs = SignsOfLife(sign)

    def __call__(self, name: str) -> None:
        """Evaluates a request, and writes its result; errors of the evaluation are raised."""
        request = self._requests.read(name)
        if request is None:
            raise ProcessFailedError(f"{self._requests.place(name)} has no request that can be read.")
        recorder = EventRecorder()
        self._trainer.add_callback(recorder)
        self._trainer.add_callback(self._signs)
        try:
            metrics = self._evaluate(request)
        finally:
            self._trainer.remove_callback(recorder)
            self._trainer.remove_callback(self._signs)
        Result(events=tuple(recorder.events), metrics=metrics).write(self._requests.place(name))

    def _evaluate(self, request: EvaluationRequest) -> dict[str, Any]:
        trainer = self._trainer
        place = self._requests.place(request.name)
        state = trainer.state
        state.global_step = request.step
        state.epoch = request.epoch
        state.max_steps = request.max_steps
        state.log_history.clear()
        keys = None if request.ignore_keys is None else list(request.ignore_keys)
        states = rng.load(place / STATES_NAME)
        metrics: dict[str, Any] = {}
        for prefix in request.parts:
            trainer._load_from_checkpoint(str(self._requests.weights(request.name, prefix)))
            rng.restore(states)
            if prefix == MAIN_PART:
                metrics |= trainer._evaluate(None, keys, skip_scheduler=True)
            else:
                metrics |= trainer.evaluate(None, keys, metric_key_prefix=prefix)
        return metrics


@contextmanager
def opened(path: Path, thaw: Thaw, *, sign: Callable[[], object] = bool) -> Iterator[RequestedEvaluation]:
    """Reads a frozen trainer; within the context, it evaluates as the run does while it trains."""
    with thaw(path, device_argument="eval_device") as (trainer, folder):
        yield RequestedEvaluation(trainer, Requests(folder), sign=sign)


def main(thaw: Thaw, path: Path, parent: int) -> None:
    """Evaluates until standard input ends, or the run does, whose process is `parent`."""
    ignore_signals()
    pipes = ParentPipes()
    names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        try:
            for name in pipes.lines(parent):
                names.put(name)
        finally:
            shutil.rmtree(path.parent, ignore_errors=True)  # the run may have been killed
            end_own_group()

    threading.Thread(target=read, daemon=True).start()
    try:
        with opened(path, thaw, sign=lambda: pipes.answer(alive=True)) as evaluate:
            pipes.answer(ready=True)
            while True:
                name = names.get()
                try:
                    evaluate(name)
                except Exception:
                    pipes.answer(failed=traceback.format_exc())
                else:
                    pipes.answer(done=name)
    except ArgumentError as error:
        pipes.answer(failed=str(error))
    except Exception:
        pipes.answer(failed=traceback.format_exc())
