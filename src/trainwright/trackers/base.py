"""TrackerCallback: turns the events of a run into calls of a tracker's client; each tracker has a file with its calls.

Only the first process reports. `setup`, `send`, `saved`, `predicted` and `close` run on the tracker's own thread (see
`TrackerThread`). A subclass from outside of this package may use the client in its own events: its `setup` is waited
for.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

from trainwright._types import counted, plain_numbers
from trainwright.callbacks.base import TiedToProcess, TrainerCallback
from trainwright.config.coerce import output_path
from trainwright.config.protocol import Arguments
from trainwright.errors import needs_package
from trainwright.journal import record
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support.hooks import definer
from trainwright.trackers.own_random import CLIENTS, give_own_random

logger = logging.getLogger(__name__)

TRACKERS_OF_TRANSFORMERS = "transformers.integrations.integration_utils"  # module of the original's trackers
QUEUE_LENGTH = 1024
NUM_TRIES = 3
PAUSE_S = 0.05  # before the second try, doubled before each further one
FAILURES_TO_STOP = 3  # calls in a row
FLUSH_TIMEOUT_S = 10.0

Call = Callable[[], None]

Client: TypeAlias = Any  # an object of a service's package: most of them have no types, and none need be installed
Values: TypeAlias = dict[str, object]  # name -> number, text, or whatever the user logs

ENDS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
"""Names that are logged once, at the end of a training, and have no curve."""


def rewrite_logs(d: Mapping[str, object]) -> Values:
    """Groups logs for trackers: `eval_x` as `eval/x`, `test_x` as `test/x`, `guard/x` as it is, all else as `train/x`.

    Args:
        d: name -> value.

    Returns:
        The same values under the new names.
    """
    renamed: Values = {}
    for name, value in d.items():
        kind, _, rest = name.partition("_")
        grouped = f"{kind}/{rest}" if kind in ("eval", "test") and name != kind else f"train/{name}"
        renamed[name if name.startswith("guard/") else grouped] = value
    return renamed


def client(name: str, module: str, package: str | None = None) -> Client:
    """Imports the module of a tracker (`name` in report_to), or names the package to install (`package`)."""
    with needs_package(f"report_to={name!r} needs a package that is not installed: pip install {package or module}"):
        imported = import_module(module)
    give_own_random((*CLIENTS, module.partition(".")[0]))  # it sends, and tries again, on the tracker's thread
    return imported


def collect_settings(args: Arguments, model: object) -> Values:
    """Merges the model's configuration and the arguments, which win, as plain values without secrets."""
    settings = {**read_model_config(model), **args.to_dict()}
    adapters = getattr(model, "peft_config", None)
    return settings if adapters is None else {"peft_config": adapters, **settings}


def read_model_config(model: object) -> Values:
    """Returns the model's configuration as a dict; empty if it has none."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return {}
    return dict(config) if isinstance(config, dict) else config.to_dict()


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Returns the logged values that are numbers."""
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def is_set(variable: str) -> bool:
    """Returns whether an environment variable is set to 1, on, yes or true."""
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


class TrackerThread:
    """Runs a tracker's calls in order on their own thread: a failing or hanging call does not affect training.

    After several failed calls the tracker is disabled until the end of the run, when it gets the missing values from
    the journal; so are values of calls that do not fit into the queue.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_disabled = False
        self._calls: Calls = queue.Queue(QUEUE_LENGTH)
        self.thread: threading.Thread | None = None  # since the first call was queued
        self._num_failures = 0
        self._has_warned = False

    def submit(self, call: Call, *, missed: Call | None = None) -> None:
        """Queues a call, tried three times at most; `missed` runs (on either thread) if it is dropped; None: none."""
        if self.thread is None:
            # The thread holds the queue alone, so it ends with this object: no call is queued then, as each holds it.
            target = partial(_work, self._calls)
            self.thread = threading.Thread(target=target, name=f"tracker-{self.name}", daemon=True)
            self.thread.start()
            weakref.finalize(self, self._calls.put, None).atexit = False
            _with_calls.add(self)
        try:
            self._calls.put_nowait((self, call, missed))
        except queue.Full:
            self._warn(f"{self.name} does not keep up; the missing values are sent at the end of the run.")
            if missed is not None:
                missed()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all queued calls are made, 10 seconds by default; returns False if calls are left then."""
        limit = time.monotonic() + (FLUSH_TIMEOUT_S if timeout_s is None else timeout_s)
        with self._calls.all_tasks_done:
            while self._calls.unfinished_tasks:
                remaining = limit - time.monotonic()
                if remaining <= 0:
                    return False
                self._calls.all_tasks_done.wait(remaining)
        return True

    def reopen(self) -> None:
        """Enables a disabled tracker again."""
        self.is_disabled = False
        self._num_failures = 0

    def make(self, call: Call, missed: Call | None) -> None:
        """Makes a call, on the thread."""
        if missed is None:
            self._succeeds(call)
        elif self.is_disabled or not self._succeeds(call):
            missed()
        else:
            self._num_failures = 0

    def _succeeds(self, call: Call) -> bool:
        for attempt in range(NUM_TRIES):
            try:
                call()
            except Exception as error:
                self._warn(
                    f"{self.name} failed: {type(error).__name__}: {error}. Training continues, with another try."
                )
                time.sleep(PAUSE_S * 2**attempt if attempt + 1 < NUM_TRIES else 0)
            else:
                return True
        self._num_failures += 1
        if self._num_failures >= FAILURES_TO_STOP and not self.is_disabled:
            self.is_disabled = True
            logger.warning(
                "%s is left alone until the end of the run: %d calls in a row failed.", self.name, self._num_failures
            )
        return False

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            logger.warning("%s", text)
        self._has_warned = True


# Calls in order, each with whom it belongs to; None ends the thread.
Calls: TypeAlias = "queue.Queue[tuple[TrackerThread, Call, Call | None] | None]"


def _work(calls: Calls) -> None:
    while _make_next(calls):
        pass


def _make_next(calls: Calls) -> bool:
    """Makes the next call; returns False at the end. Nothing of the call is held while the thread waits."""
    queued = calls.get()
    try:
        if queued is None:
            return False
        owner, call, missed = queued
        owner.make(call, missed)
        return True
    finally:
        calls.task_done()


_with_calls: weakref.WeakSet[TrackerThread] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    """Waits at the end of the process until all trackers have made their calls."""
    for thread in list(_with_calls):
        thread.flush()


class TrackerCallback(TrainerCallback, TiedToProcess):
    """Base of all trackers. A subclass overrides `setup`, `send`, and any others that its service supports.

    Attributes:
        name: name of the tracker in `report_to`.
        takes_values: whether logged values and the metrics of predictions are sent.

    Example:
        class PrintTracker(TrackerCallback):
            name = "print"

            def send(self, values, state):
                print(state.global_step, values)
    """

    name: ClassVar[str] = ""
    takes_values: ClassVar[bool] = True

    def __init__(self) -> None:
        self._initialized = False
        self._guard = TrackerThread(self.name)
        self._missed: set[tuple[int, str]] = set()  # (step, name) of values that were not taken; two threads add to it
        self._handle: str | None = None  # id of the run at the service
        self._resumed_at = 0  # the step from which training resumed
        self._is_caught_up = False  # whether values of a killed process were sent again

    def setup(self, args: Arguments, state: TrainerState, model: object, **kwargs: object) -> None:
        """Opens the run at the service. Runs once for each training, on the tracker's thread.

        Args:
            args: arguments of the run.
            state: copy of the record, as it was when training began.
            model: the model in training; read only.
            **kwargs: not used today.
        """

    def send(self, values: Values, state: TrainerState) -> None:
        """Sends logged values.

        Args:
            values: name to value; numbers are Python numbers.
            state: copy of the record at that log; `global_step` is its step.
        """

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        """Handles a new checkpoint.

        Args:
            folder: the committed checkpoint.
            args: arguments of the run.
            state: copy of the record at that save.
        """

    def predicted(self, metrics: Values, state: TrainerState) -> None:
        """Sends the metrics of a `predict()`, by name."""

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        """Closes the run at the service; `kwargs` holds `model` and the other objects of an event."""

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if not state.is_world_process_zero:
            return
        if state.is_hyper_param_search:  # each trial is a run of its own
            self._initialized = False
        if state.global_step > 0 and self._handle is None and (known := known_run(args)) is not None:
            handles = [str(entry["handle"]) for entry in known.of("tracker") if entry["name"] == self.name]
            self._handle = handles[-1] if handles else None
        self._resumed_at = state.global_step
        self._is_caught_up = False
        state = copy.copy(state)  # training changes the record
        model = kwargs.pop("model", None)
        self._guard.submit(lambda: self._open(args, state, model))
        if not type(self).__module__.startswith("trainwright.trackers."):
            self._guard.flush()

    def on_log(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.takes_values:
            values = plain_numbers(dict(kwargs.get("logs", {})))
            state = copy.copy(state)
            missed = partial(self._missed.update, {(state.global_step, name) for name in values})
            self._report(self.send, values, args, state, kwargs.get("model"), missed=missed)

    def on_predict(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.takes_values:
            values = plain_numbers(dict(kwargs.get("metrics", {})))
            self._report(self.predicted, values, args, copy.copy(state), kwargs.get("model"))

    def _report(
        self,
        send: Callable[[Values, TrainerState], None],
        values: Values,
        args: Arguments,
        state: TrainerState,
        model: object,
        *,
        missed: Call | None = None,
    ) -> None:
        def call() -> None:
            self._open(args, state, model)
            send(values, state)

        self._guard.submit(call, missed=missed)

    @property
    def loses_what_it_took(self) -> bool:
        """Returns True if values that the client has taken are lost when the process is killed."""
        return False

    @property
    def looks_at_files(self) -> bool:
        """Returns True if the tracker reads a checkpoint's files; if not, a save does not wait for them."""
        return definer(self, "saved") is not TrackerCallback

    def on_save(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if not state.is_world_process_zero:
            return
        state = copy.copy(state)
        folder = Path(output_path(args)) / f"checkpoint-{state.global_step}"

        def call() -> None:
            if self._initialized:
                self.saved(folder, args, state)
                if not (self._missed or self._guard.is_disabled or self.loses_what_it_took):
                    self._write_down(args, "delivered", step=state.global_step)  # all values up to this step

        self._guard.submit(call)

    def on_train_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.is_world_process_zero:
            self._finish(args, copy.copy(state), **kwargs)

    def on_exception(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.is_world_process_zero and self._guard.thread is not None:
            kwargs.pop("exception", None)
            self._finish(args, copy.copy(state), **kwargs)

    def _finish(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        """Sends the values that were not taken, closes the run, and waits for both up to a time limit."""
        is_done = self._guard.flush()
        if self._missed:
            self._guard.reopen()
            self._guard.submit(lambda: self._backfill(args, state, kwargs.get("model")))
        self._guard.submit(lambda: self.close(args, state, **kwargs) if self._initialized else None)
        if not (is_done and self._guard.flush()):
            note = "%s has not taken everything yet; it continues in the background while this process lives. "
            logger.warning(note + "All values are in %s.", self.name, record.JOURNAL_NAME)
        elif self._missed:
            logger.warning(
                "%s did not take %s, which %s has.",
                self.name,
                counted(len(self._missed), "value"),
                record.JOURNAL_NAME,
            )

    def _open(self, args: Arguments, state: TrainerState, model: object) -> None:
        if not self._initialized:
            self.setup(args, state, model)
            self._initialized = True
        if not self._is_caught_up:
            self._catch_up(args, state)
            self._is_caught_up = True

    def _catch_up(self, args: Arguments, state: TrainerState) -> None:
        """Sends values that a killed process had logged before the checkpoint and not noted as delivered."""
        if self._resumed_at == 0 or (known := known_run(args)) is None:
            return
        steps = (entry["step"] for entry in known.of("delivered") if entry["name"] == self.name)
        delivered = max(steps, default=0)
        for step, values in known.logs():
            if delivered < step <= self._resumed_at:
                self.send(values, at_step(state, step, values))

    def remember(self, args: Arguments, handle: str) -> None:
        """Writes the id of this run at the service into the journal, so that a resume continues the same run."""
        self._handle = handle
        self._write_down(args, "tracker", handle=handle)

    def _write_down(self, args: Arguments, kind: str, **values: object) -> None:
        journal = record.live_journal(output_path(args))
        if journal is None and (known := known_run(args)) is not None:
            journal = record.FileJournal(output_path(args), known.run_id)
        if journal is not None:
            journal.write(kind, name=self.name, **values)

    def _backfill(self, args: Arguments, state: TrainerState, model: object) -> None:
        """Sends the values that were not taken, from the journal, in the order of steps."""
        missed = self._missed.copy()
        self._open(args, state, model)
        for step, values in record.read(output_path(args)).logs():
            now = {name: value for name, value in values.items() if (step, name) in missed}
            if now:
                self.send(now, at_step(state, step, values))
            self._missed.difference_update({key for key in missed if key[0] == step})


def at_step(state: TrainerState, step: int, values: Mapping[str, object]) -> TrainerState:
    """Returns a copy of the record with step and epoch of an earlier log."""
    then = copy.copy(state)
    then.global_step = step
    then.epoch = cast(float, values.get("epoch", state.epoch))
    return then


def known_run(args: Arguments) -> record.Record | None:
    """Reads the journal of this run; None if there is none, or nothing in it yet."""
    journal = record.live_journal(output_path(args))
    try:
        return record.read(output_path(args), None if journal is None else journal.run_id)
    except (OSError, ValueError):
        return None
