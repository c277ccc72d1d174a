"""The journal of a run: one JSON object a line, appended and flushed at each log. It is the truth of what happened.

A run that is killed and resumed writes to the same file; `read` then gives what an uninterrupted run would have
written: what a dead run logged after the step that was resumed is superseded.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainwright._types import JSONObject, json_value, without_tokens
from trainwright.config.protocol import Arguments
from trainwright.journal.timeline import summary
from trainwright.state.clock import Clock
from trainwright.state.trainer_state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

JOURNAL_NAME = "journal.jsonl"
# Kinds of entries that belong to a step, so that a resume from an earlier one supersedes them.
OF_A_STEP = ("log", "evaluation", "save", "delivered", "incident", "warning")

Entry = dict[str, Any]  # Any: whatever JSON holds


class Journal(Protocol):
    """Destination of entries."""

    def write(self, kind: str, **values: object) -> None: ...


class NullJournal:
    """Writes nothing: the journal of a process that is not the first, and of a trainer that does not train."""

    def write(self, kind: str, **values: object) -> None:
        """Does nothing."""


class FileJournal:
    """Appends to the journal in a run's directory. What goes wrong is said once and never ends a run."""

    def __init__(self, folder: str | Path, run_id: str) -> None:
        self.path = Path(folder) / JOURNAL_NAME
        self.run_id = run_id
        self._lock = threading.Lock()
        self._has_failed = False

    def write(self, kind: str, **values: object) -> None:
        try:
            masked = _masked(json_value(values))
            line = json.dumps({"kind": kind, "run": self.run_id, "time": time.time(), **masked}) + "\n"
            with self._lock:
                append(self.path, line)
        except Exception as error:  # also from the text of an object that somebody logged
            is_first, self._has_failed = not self._has_failed, True  # set first: a warning is an entry itself
            if is_first:
                logger.warning("%s cannot be written, so this run is not recorded there: %s", self.path, error)


def _masked(value: Any) -> Any:  # JSON
    """Returns JSON without what looks like a key or a token in its texts."""
    if isinstance(value, dict):
        return {name: _masked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return without_tokens(value) if isinstance(value, str) else value


def append(path: Path, line: str) -> None:
    """Appends a line; starts a new one where a killed process left half a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())


@dataclass
class Record:
    """Record of one run from its journal."""

    run_id: str  # id of the run
    entries: list[Entry] = field(default_factory=list)  # those that count, in order
    # name -> step -> value: one value for each name and step
    values: dict[str, dict[int, object]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Entry]:
        """Returns the entries of a kind."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns steps and numbers of a name, in the order of steps."""
        found = sorted((step, number(value)) for step, value in self.values.get(name, {}).items())
        return [step for step, _ in found], [value for _, value in found]

    def logs(self) -> list[tuple[int, dict[str, object]]]:
        """Returns the logged values of each step, in the order of steps."""
        steps: dict[int, dict[str, object]] = {}
        for name, series in self.values.items():
            for step, value in series.items():
                steps.setdefault(step, {})[name] = value
        return sorted(steps.items())


def number(value: Any) -> float:
    """Converts a logged value to a number; other text is NaN."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def read(path: str | Path, run_id: str | None = None) -> Record:
    """Reads a run from its journal (or its directory): the one of `run_id`, or the last that began.

    Raises:
        FileNotFoundError, ValueError: there is no journal, or it has no such run.
    """
    path = Path(path)
    entries = list(lines(path / JOURNAL_NAME if path.is_dir() else path))
    if run_id is None:
        began = [entry["run"] for entry in entries if entry["kind"] in ("start", "resume")]
        run_id = began[-1] if began else None
    if run_id is None or not any(entry["run"] == run_id for entry in entries):
        raise ValueError(f"{path} has no run {run_id or 'in it'}; it has {len(entries)} entries.")
    return of_one_run([entry for entry in entries if entry["run"] == run_id])


def lines(path: Path) -> Iterator[Entry]:
    """Yields the entries of a file, without a line that a killed process did not finish."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and isinstance(entry.get("kind"), str) and "run" in entry:
                yield entry


def of_one_run(entries: Iterable[Entry]) -> Record:
    """Makes the record of a run's entries: later ones win, and those beyond the step of a resume are superseded."""
    kept: list[Entry] = []
    for entry in entries:
        if entry["kind"] == "resume":
            kept = [one for one in kept if not (one["kind"] in OF_A_STEP and one.get("step", 0) > entry["step"])]
        kept.append(entry)
    record = Record(run_id=kept[0]["run"] if kept else "", entries=kept)
    for entry in kept:
        for name, value in entry.get("values", {}).items() if entry["kind"] in ("log", "evaluation") else ():
            record.values.setdefault(name, {})[entry["step"]] = value
    return record


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
        text = record.getMessage()
        if text not in self._known:
            self._known.add(text)
            self._waiting.append({"step": self._keeper.step_now(), "text": text, "source": record.name})

    def write_down(self) -> None:
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self._keeper.journal.write("warning", **entry)
