"""JournalListener: turns the events of a run into entries of its journal. It is no callback of the user's."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from trainwright._types import JSONObject
from trainwright.config.protocol import Arguments
from trainwright.journal.record import Journal, NullJournal
from trainwright.journal.timeline import summary
from trainwright.state.clock import Clock
from trainwright.state.trainer_state import TrainerControl, TrainerState


class JournalListener:
    """Gets every event before the callbacks, so that the journal has the logs without their changes.

    Attributes:
        journal: of the run under way; none before the first `train()`, and none where output is not saved.
        clock: of the run under way.
    """

    def __init__(self, clock: Clock) -> None:
        self.journal: Journal = NullJournal()
        self.clock = clock
        self._warnings = WarningRecorder(self)
        self.step_now: Callable[[], int] = int

    def begin(
        self, journal: Journal, step_now: Callable[[], int], *, checkpoint: str | None, facts: JSONObject
    ) -> None:
        """Starts the journal of a run; `facts` describe it, `step_now` returns its step."""
        self.journal, self.step_now = journal, step_now
        journal.write("start" if checkpoint is None else "resume", step=step_now(), checkpoint=checkpoint, **facts)
        self._warnings.listen()

    def on_log(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: object,
    ) -> None:
        self._warnings.write_down()
        values = dict(logs)
        is_evaluation = any(str(name).startswith("eval_") for name in values)
        self.journal.write("evaluation" if is_evaluation else "log", step=state.global_step, values=values)
        if values.get("num_non_finite_losses"):
            number = values["num_non_finite_losses"]
            self.incident(state.global_step, f"{number} losses since the last log were not finite.")

    def on_save(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._warnings.write_down()
        self.journal.write("save", step=state.global_step, best=state.best_model_checkpoint)

    def on_train_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.journal.write("end", step=state.global_step, best=state.best_model_checkpoint)

    def end(self) -> dict[str, float]:
        """Ends the journal after the callbacks' last event; returns seconds by phase."""
        self._warnings.write_down()
        self._warnings.stop()
        seconds = self.clock.read()
        self.journal.write("time", time_by_phase=summary(seconds))
        return seconds

    def on_exception(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        error = kwargs["exception"]
        text = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else str(error)
        self.journal.write("failed", step=state.global_step, error=type(error).__name__, traceback=text)
        self.end()

    def on_incident(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        incident: Any = kwargs["incident"]  # a guard.Incident, or what a user's code fires
        self.incident(incident.step, incident.text)

    def incident(self, step: int, text: str) -> None:
        """Records an incident."""
        self.journal.write("incident", step=step, text=text)


class WarningRecorder(logging.Handler):
    """Records the warnings of the package during a run, from any thread, each text once.

    It waits for the next log or save with that: a step writes nothing.
    """

    def __init__(self, keeper: JournalListener) -> None:
        super().__init__(logging.WARNING)
        self._waiting: list[JSONObject] = []
        self._known: set[str] = set()
        self._keeper = keeper
        self._logger = logging.getLogger(__name__.partition(".")[0])

    def listen(self) -> None:
        self.stop()
        self._known.clear()
        self._logger.addHandler(self)

    def stop(self) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record)
        text = record.getMessage()
        if text not in self._known:
            self._known.add(text)
            self._waiting.append({"step": self._keeper.step_now(), "text": text, "source": record.name})

    def write_down(self) -> None:
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self._keeper.journal.write("warning", **entry)

    def _show(self, record: logging.LogRecord) -> None:
        """Shows a warning where logging is not set up: python does so itself only without a handler like this."""
        place: logging.Logger | None = logging.getLogger(record.name)
        while place is not None:
            if any(handler is not self for handler in place.handlers):
                return
            place = place.parent if place.propagate else None
        if logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)
