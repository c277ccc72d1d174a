"""TrackerCallback: from the events of a run to the calls of a tracker. What the calls are is in a file for each.

Only the first process reports. `setup`, `send`, `saved`, `predicted` and `close` run on the tracker's own thread (see
`tracker_thread.py`). A subclass from outside of this package may use the client in its own events: its `setup` is
waited for.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainwright.callbacks.base import TrainerCallback
from trainwright.errors import MissingPackageError
from trainwright.evaluation.metrics_io import plain_numbers
from trainwright.hooks import definer
from trainwright.journal import record
from trainwright.trackers.tracker_thread import PendingCalls, TrackerThread

logger = logging.getLogger(__name__)

ENDS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
"""What is logged once, at the end of a training, and has no curve."""


def rewrite_logs(d: Mapping[str, Any]) -> dict[str, Any]:
    """Logs as trackers group them: `eval_x` as `eval/x`, `test_x` as `test/x`, all else as `train/x`."""
    renamed = {}
    for name, value in d.items():
        kind, _, rest = name.partition("_")
        renamed[f"{kind}/{rest}" if kind in ("eval", "test") and name != kind else f"train/{name}"] = value
    return renamed


def missing(name: str, package: str) -> MissingPackageError:
    return MissingPackageError(f"report_to={name!r} needs a package that is not installed: pip install {package}")


def settings_of(args: Any, model: Any) -> dict[str, Any]:
    """The model's configuration and the arguments, which win, as plain values; tokens are marked."""
    settings = {**config_of(model), **args.to_dict()}
    adapters = getattr(model, "peft_config", None)
    return settings if adapters is None else {"peft_config": adapters, **settings}


def config_of(model: Any) -> dict[str, Any]:
    config = getattr(model, "config", None)
    return {} if config is None else dict(config) if isinstance(config, dict) else config.to_dict()


class TrackerCallback(TrainerCallback):
    """Base of all trackers.

    Attributes:
        name: as `report_to` has it.
    """

    name: ClassVar[str] = ""

    def __init__(self) -> None:
        self._initialized = False
        self._guard = TrackerThread(self.name)
        self._missed = PendingCalls()
        self._handle: str | None = None  # by which the service knows the run
        self._run_id: str | None = None  # by which the journal knows it; empty: there is no journal
        self._resumed_at = 0  # the step that a training goes on from
        self._is_caught_up = False  # with what a killed process had logged until then

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Opens the run at the service."""

    def send(self, values: dict[str, Any], state: Any) -> None:
        """Shows what was logged; `state` is as it was then."""

    def saved(self, folder: Path, args: Any, state: Any) -> None:
        """A checkpoint is in `folder`."""

    def predicted(self, metrics: dict[str, Any], state: Any) -> None:
        """Shows the metrics of a prediction."""

    def close(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Training is over."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if state.is_hyper_param_search:  # each trial is a run of its own
            self._initialized = False
        if state.global_step > 0 and self._handle is None:
            self._handle = handle_of(args, self.name)
        self._run_id, self._resumed_at, self._is_caught_up = None, state.global_step, False
        state, model = snapshot(state), kwargs.pop("model", None)
        self._guard.submit(lambda: self._open(args, state, model))
        if not type(self).__module__.startswith("trainwright.trackers."):
            self._guard.flush()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        values, model, state = plain_numbers(dict(kwargs["logs"])), kwargs.get("model"), snapshot(state)

        def call() -> None:
            self._open(args, state, model)
            self.send(values, state)

        self._guard.submit(call, missed=lambda: self._missed.add(state.global_step, values))

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        metrics, model, state = plain_numbers(dict(kwargs["metrics"])), kwargs.get("model"), snapshot(state)

        def call() -> None:
            self._open(args, state, model)
            self.predicted(metrics, state)

        self._guard.submit(call)

    @property
    def loses_what_it_took(self) -> bool:
        """Whether values that the client has taken are gone when the process is killed."""
        return False

    @property
    def looks_at_files(self) -> bool:
        """Whether it does anything with a checkpoint's files; if not, a save need not wait for them."""
        return definer(self, "saved") is not TrackerCallback

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        state, folder = snapshot(state), Path(args.output_dir) / f"checkpoint-{state.global_step}"

        def call() -> None:
            if self._initialized:
                self.saved(folder, args, state)
                self._note_delivery(args, state)

        self._guard.submit(call)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._finish(args, snapshot(state), **kwargs)

    def on_exception(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._guard.is_used:
            kwargs.pop("exception", None)
            self._finish(args, snapshot(state), **kwargs)

    def _finish(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Makes up for what was missed, closes the run, and waits for both, for a while."""
        is_done = self._guard.flush()
        if len(self._missed):
            self._guard.reopen()
            self._guard.submit(lambda: self._backfill(args, state, kwargs.get("model")))
        self._guard.submit(lambda: self.close(args, state, **kwargs) if self._initialized else None)
        if not (is_done and self._guard.flush()):
            logger.warning("%s has not taken everything yet; it goes on in the background while this process lives. "
                           "All values are in %s.", self.name, record.JOURNAL_NAME)  # fmt: skip
        elif len(self._missed):
            logger.warning("%s did not take %d values; they are in %s.", self.name, len(self._missed),
                           record.JOURNAL_NAME)  # fmt: skip

    def _open(self, args: Any, state: Any, model: Any) -> None:
        if not self._initialized:
            self.setup(args, state, model)
            self._initialized = True
        if not self._is_caught_up:
            self._catch_up(args, state)
            self._is_caught_up = True

    def _catch_up(self, args: Any, state: Any) -> None:
        """Sends what a process that was killed had logged before the checkpoint, and perhaps not sent."""
        if self._resumed_at == 0 or (known := known_run(args)) is None:
            return
        steps = (entry["step"] for entry in known.of("delivered") if entry["name"] == self.name)
        delivered = max(steps, default=0)
        for step, values in known.logs():
            if delivered < step <= self._resumed_at:
                self.send(values, as_of(state, step, values))

    def _note_delivery(self, args: Any, state: Any) -> None:
        """Keeps in the journal that a resume from here has nothing to make up for."""
        if not (len(self._missed) or self._guard.is_disabled or self.loses_what_it_took):
            self._write_down(args, "delivered", step=state.global_step)

    def remember(self, args: Any, handle: str) -> None:
        """Keeps in the journal by which name the service knows this run, so that a resumed one can go on in it."""
        self._handle = handle
        self._write_down(args, "tracker", handle=handle)

    def _write_down(self, args: Any, kind: str, **values: Any) -> None:
        if self._run_id is None:
            self._run_id = "" if (known := known_run(args)) is None else known.run_id
        if self._run_id:
            record.FileJournal(args.output_dir, self._run_id).write(kind, name=self.name, **values)

    def _backfill(self, args: Any, state: Any, model: Any) -> None:
        """Sends what was missed, in the order of steps, as the journal has it."""
        missed = self._missed.take()
        try:
            self._open(args, state, model)
            for step, values in record.read(args.output_dir).logs():
                now = {name: value for name, value in values.items() if name in missed.get(step, ())}
                if now:
                    self.send(now, as_of(state, step, values))
                missed.pop(step, None)
        finally:
            for step, names in missed.items():
                self._missed.add(step, names)


def snapshot(state: Any) -> Any:
    """The record as it is now: the training goes on while a tracker reads it."""
    return copy.copy(state)


def as_of(state: Any, step: int, values: Mapping[str, Any]) -> Any:
    """The record as it was at an earlier step, as far as a tracker looks at it."""
    then = snapshot(state)
    then.global_step, then.epoch = step, values.get("epoch", state.epoch)
    return then


def known_run(args: Any) -> record.Record | None:
    """This run as its journal has it; None if it keeps none."""
    try:
        return record.read(args.output_dir)
    except (OSError, ValueError):
        return None


def handle_of(args: Any, name: str) -> str | None:
    """By which name a service knew this run before it was interrupted."""
    entries = [] if (known := known_run(args)) is None else known.of("tracker")
    return next((entry["handle"] for entry in reversed(entries) if entry["name"] == name), None)
