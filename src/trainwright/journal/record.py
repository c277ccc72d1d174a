"""The journal of a run: one JSON object a line, appended and flushed at each log.

It begins with the environment of the run: versions, commit, hardware, data, arguments without tokens.

A run that is killed and resumed writes to the same file; `read` then gives the entries of an uninterrupted
run: logs of the dead run after the resumed step are superseded.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import math
import os
import platform
import re
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch

from trainwright._types import TRAINING_ARGS_JSON_NAME, JSONObject, counted, has_length, json_value, without_tokens
from trainwright.config.protocol import Arguments
from trainwright.distributed.device import DeviceMemory, find_name
from trainwright.errors import DataError
from trainwright.journal.entries import MAX_LINE, list_kinds, parse_entry
from trainwright.journal.forms import Entry
from trainwright.state.progress import Clock
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support import host
from trainwright.support.deadline import run_command
from trainwright.support.door import read_json

logger = logging.getLogger(__name__)

JOURNAL_NAME = "journal.jsonl"
PACKAGES = ("trainwright", "torch", "transformers", "accelerate", "datasets", "peft", "numpy", "safetensors")
# In the names of arguments.
SECRET = re.compile(
    "token(?!izer|s_seen)|secret|passw|passphrase|credential|connection_?string|(?:api|access|account|private)_?key"
    "|(?<![a-z])sas(?![a-z])|auth(?!or(?!iz))"
)
BEGIN_A_FILE = ("log", "evaluation", "save")


class NullJournal:
    """Writes nothing: the journal of a process that is not the first, and of a trainer that does not train."""

    def write(self, kind: str, **values: object) -> None: ...

    def close(self) -> None: ...


class FileJournal:
    """Appends to the journal in a run's directory. What goes wrong is said once and never ends a run.

    Args:
        folder: the run's directory.
        run_id: id of the run.
        waits: a file that is not there yet is made with the first log or save; entries before it wait in memory. So a
            run that fails earlier leaves no file.
    """

    def __init__(self, folder: str | Path, run_id: str, *, waits: bool = False) -> None:
        self.path = Path(folder) / JOURNAL_NAME
        self._waits = waits
        self._waiting: list[bytes] = []  # lines of before the file is made
        self.run_id = run_id
        self._lock = threading.Lock()
        self._has_failed = False
        self._file: OpenFile | None = None

    def write(self, kind: str, **values: object) -> None:
        try:
            entry = {"kind": kind, "run": self.run_id, "time": time.time(), **json_value(values, text=without_tokens)}
            line = json.dumps(entry) + "\n"
            with self._lock:
                self._waiting.append(line.encode())
                if not self._waits or kind in BEGIN_A_FILE or os.path.lexists(self.path):
                    while self._waiting:
                        self._append(self._waiting.pop(0))
        except Exception as error:  # may come from `str` of a logged object
            self._waiting.clear()
            is_first = not self._has_failed
            self._has_failed = True  # set before the warning, which is an entry itself
            if is_first:
                logger.warning("%s cannot be written, so this run is not recorded there: %s", self.path, error)

    def _append(self, line: bytes) -> None:
        """Appends to the file. It stays open until another process writes to it or moves it."""
        if self._file is None or not self._file.is_as_left(self.path):
            self._close_file()
            self._file = OpenFile(self.path)
        self._file.append(line)

    def close(self) -> None:
        """Closes the file; a later entry opens it again. Entries that wait for the file are dropped."""
        self._waiting.clear()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# Journals of runs under way, by the path of their file, which may not be there yet.
_LIVE: weakref.WeakValueDictionary[str, FileJournal] = weakref.WeakValueDictionary()


def live_journal(folder: str | Path) -> FileJournal | None:
    """Returns the journal of the run of this process that writes into a directory; None without one."""
    return _LIVE.get(os.path.abspath(Path(folder) / JOURNAL_NAME))


Journal: TypeAlias = NullJournal | FileJournal


class OpenFile:
    """A file that is open to append lines; begins a new line if a killed process left half a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed; delete it")
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        for name in ("O_BINARY", "O_NOFOLLOW", "O_NONBLOCK"):  # the last for a pipe of that name
            flags |= getattr(os, name, 0)
        self._number = os.open(path, flags, 0o666)
        self.close = weakref.finalize(self, os.close, self._number)
        self._status = os.fstat(self._number)
        if not stat.S_ISREG(self._status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file; delete it")
        self._size = self._status.st_size
        if self._size > 0:
            os.lseek(self._number, -1, os.SEEK_END)
            if os.read(self._number, 1) != b"\n":
                self.append(b"\n")

    def append(self, line: bytes) -> None:
        """Appends to the file; OSError if the line does not fit."""
        self._size += len(line)
        if os.write(self._number, line) != len(line):  # makes the next line see another size and reopen the file
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def is_as_left(self, path: Path) -> bool:
        """Returns False if the last line is unfinished, or the file was moved, deleted or written to by others."""
        try:
            status = os.lstat(path)
        except OSError:
            return False
        return status.st_size == self._size and os.path.samestat(status, self._status)


@dataclass
class Record:
    """Record of one run from its journal."""

    run_id: str  # id of the run
    entries: list[Entry] = field(default_factory=list)  # valid entries, in order
    # name -> step -> value: one value for each name and step
    values: dict[str, dict[int, object]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Entry]:
        """Returns the entries of a kind."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    def warnings(self) -> list[Entry]:
        """Returns the warnings, each text once: a resumed run finds the same in its data again."""
        return list({entry["text"]: entry for entry in reversed(self.of("warning"))}.values())[::-1]

    def findings(self) -> list[Entry]:
        """Returns the warnings that a check of data, model or settings gave."""
        return [entry for entry in self.warnings() if "check" in entry]

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


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flattens nested mappings into one, with names joined by dots."""
    result: dict[str, object] = {}
    for name, value in values.items():
        full = f"{prefix}{name}"
        result |= flat(value, f"{full}.") if isinstance(value, Mapping) else {full: value}
    return result


def number(value: Any) -> float:
    """Converts a logged value to a number; other text is NaN."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def read(path: str | Path, run_id: str | None = None) -> Record:
    """Reads a run from its journal (or its directory): the run of `run_id`, or the last that began.

    Raises FileNotFoundError if there is no journal, DataError if it has no such run.
    """
    path = Path(path)
    journal = path / JOURNAL_NAME if path.is_dir() else path
    if not journal.is_file():
        reason = f", so {path} is not a run. `trainwright runs DIR` lists the runs below a directory."
        if _has_no_journal(journal.parent):
            reason = f": the run was trained with journal=False, so that nothing is recorded of it in {path}."
        raise FileNotFoundError(f"There is no {journal}{reason}")
    entries = list(lines(journal))
    if run_id is None:
        began = [entry["run"] for entry in entries if entry["kind"] in ("start", "resume")]
        run_id = began[-1] if began else None
    if run_id is None or not any(entry["run"] == run_id for entry in entries):
        raise DataError(f"{path} has no run {run_id or 'in it'}; it has {counted(len(entries), 'entry')}.")
    return make_run_record([entry for entry in entries if entry["run"] == run_id])


def _has_no_journal(folder: Path) -> bool:
    """Returns whether the arguments of the run in a directory say that it has no journal."""
    saved = folder / TRAINING_ARGS_JSON_NAME
    try:
        values = read_json(saved, max_bytes=MAX_LINE) if saved.is_file() else None
        return isinstance(values, dict) and values.get("journal") is False
    except (OSError, ValueError):
        return False


def read_findings(folder: str | Path) -> list[Entry]:
    """Returns the findings of the last run in a directory; none without a journal that can be read."""
    try:
        return read(folder).findings()
    except (OSError, DataError):
        return []


def read_logs(folder: str | Path) -> list[dict[str, object]]:
    """Returns what the last run in a directory logged at each step; nothing without a journal that can be read."""
    try:
        return [{**values, "step": step} for step, values in read(folder).logs()]
    except (OSError, DataError):
        return []


def lines(path: Path) -> Iterator[Entry]:
    """Yields the entries of a file, without lines that a killed process did not finish, or that are no entries."""
    with open(path, "rb") as file:
        is_beginning = True
        while line := file.readline(MAX_LINE):
            is_whole = line.endswith(b"\n") or len(line) < MAX_LINE
            entry = parse_entry(line) if is_beginning and is_whole else None
            is_beginning = line.endswith(b"\n")
            if entry is not None:
                yield entry


def make_run_record(entries: Iterable[Entry]) -> Record:
    """Makes the record of a run's entries: later ones win, and entries beyond the step of a resume are superseded."""
    superseded = {kind for kind, form in list_kinds().items() if form.is_of_a_step}
    kept: list[Entry] = []
    for entry in entries:
        if entry["kind"] == "resume":
            kept = [one for one in kept if not (one["kind"] in superseded and one.get("step", 0) > entry["step"])]
        kept.append(entry)
    record = Record(run_id=kept[0]["run"] if kept else "", entries=kept)
    for entry in kept:
        for name, value in entry.get("values", {}).items() if entry["kind"] in ("log", "evaluation") else ():
            record.values.setdefault(name, {})[entry["step"]] = value
    return record


class JournalListener:
    """Gets every event before the callbacks, so that the journal has the logs without their changes."""

    def __init__(self, clock: Clock) -> None:
        self.journal: Journal = NullJournal()  # journal of the current run, if its output is saved
        self.clock = clock  # clock of the current run
        self._warnings = WarningRecorder(self)
        self.step_now: Callable[[], int] = int
        self.recipe: JSONObject = {}  # what a configuration file says of the run: task, model, data, adapter
        self.known_before: list[JSONObject] = []  # entries about the data, of before a run: text, source and check

    def begin(
        self, journal: Journal, step_now: Callable[[], int], *, checkpoint: str | None, facts: JSONObject
    ) -> None:
        """Starts the journal of a run; `facts` describe it, `step_now` returns its step.

        A branch starts where it begins from a checkpoint, of another run.
        """
        self.journal = journal
        self.step_now = step_now
        if isinstance(journal, FileJournal):
            _LIVE[os.path.abspath(journal.path)] = journal
        is_first = checkpoint is None or facts.get("branch", {}).get("begins", False)
        facts = {**facts, "recipe": self.recipe} if self.recipe else facts
        journal.write("start" if is_first else "resume", step=step_now(), checkpoint=checkpoint, **facts)
        for entry in self.known_before:
            journal.write("warning", step=step_now(), **entry)
        self._warnings.begin(step_now())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens to the warnings of a whole training, also those that come before its journal begins."""
        self.step_now = int
        self._warnings.listen()
        try:
            yield
        finally:
            self._warnings.stop()

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, logs: Mapping[str, Any], **kwargs: object
    ) -> None:
        self._warnings.write_down()
        values = dict(logs)
        is_evaluation = any(str(name).startswith("eval_") for name in values)
        self.journal.write("evaluation" if is_evaluation else "log", step=state.global_step, values=values)
        if number := values.get("num_non_finite_losses"):
            text = f"Losses since the last log that were not finite: {number}."
            self.journal.write("incident", step=state.global_step, text=text)

    def on_save(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._warnings.write_down()
        self.journal.write("save", step=state.global_step, best=state.best_model_checkpoint, **peak_memory())

    def on_train_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.journal.write("end", step=state.global_step, best=state.best_model_checkpoint)

    def end(self) -> dict[str, float]:
        """Ends the journal after the callbacks' last event; returns seconds by phase."""
        self._warnings.write_down()
        self._warnings.stop()
        seconds = self.clock.read()
        phases = sorted(seconds.items(), key=lambda item: -item[1])
        times = {phase: round(value, 4) for phase, value in phases if value > 0}
        self.journal.write("time", time_by_phase=times, **peak_memory())
        self.journal.close()
        if isinstance(self.journal, FileJournal):
            _LIVE.pop(os.path.abspath(self.journal.path), None)
        return seconds

    def on_exception(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        error = kwargs["exception"]
        text = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else str(error)
        self.journal.write("failed", step=state.global_step, error=type(error).__name__, traceback=text)
        self.end()

    def on_incident(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        incident: Any = kwargs["incident"]  # a guard.Incident, or an object fired by user code
        self.journal.write("incident", step=incident.step, text=incident.text)


def peak_memory() -> dict[str, int]:
    """Returns the most memory taken so far, of the process, and by tensors on its GPU."""
    on_gpu = DeviceMemory().peak_bytes()  # 0 without one
    return {"peak_memory_bytes": host.peak_bytes()} | ({"peak_gpu_bytes": on_gpu} if on_gpu else {})


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
        self._waiting.clear()
        self._logger.addHandler(self)

    def begin(self, step: int) -> None:
        """Gives the step at which a run begins to the warnings of before it."""
        self._waiting = [{**entry, "step": step} for entry in self._waiting]

    def stop(self) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._known:
            self._known.add(text)
            entry: JSONObject = {"step": self._keeper.step_now(), "text": text, "source": record.name}
            check = getattr(record, "check", None)  # the name of the check that found it
            self._waiting.append(entry if check is None else {**entry, "check": check})

    def write_down(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for entry in waiting:
            self._keeper.journal.write("warning", **entry)


# -- the environment of a run ----------------------------------------------------------------------------------------


def collect_run_facts(args: Arguments, device: torch.device, data: Mapping[str, object]) -> JSONObject:
    """Returns the first entry of the journal of a run; `data` are the datasets by name.

    By host, id and start of the process a reader can tell whether it still runs.
    """
    pid = os.getpid()
    return {
        "arguments": without_secrets(args.to_dict()),
        "changed": changed_arguments(args),
        "environment": environment(device),
        "data": {name: data_summary(dataset) for name, dataset in data.items()},
        "process": {"host": socket.gethostname(), "pid": pid, "began": host.read_start_time(pid)},
    }


def environment(device: torch.device) -> JSONObject:
    """Returns versions, commit and hardware."""
    product = find_name(device)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := installed(name)) is not None},
        "commit": commit(os.getcwd()),
        "device": str(device) if product is None else f"{device} ({product})",
        "cpus": host.num_cpus(),
        "threads": torch.get_num_threads(),
        "memory_bytes": host.memory_bytes(),
        "script": sys.argv[0] if sys.argv else "",
    }


@functools.cache  # the packages of a process do not change; reading their metadata takes milliseconds
def installed(package: str) -> str | None:
    """Returns the version of an installed package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # the code of a process does not change while it runs
def commit(folder: str) -> str | None:
    """Returns the commit of the directory of the start, with a mark if files differ from it; None if unknown."""

    def git(*words: str) -> str:
        # No lock of the index, which would stay if git is ended; no program that the settings of the directory name.
        command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", folder, *words]
        done = run_command(command, seconds=5)
        done.check_returncode()
        return done.stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return f"{head}, with changes" if git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return None


def changed_arguments(args: Arguments) -> JSONObject:
    """Returns the arguments that differ from the defaults."""
    from trainwright.config.summary import differing

    try:
        return without_secrets(dict(differing(args)))
    except TypeError:  # arguments of another package: its defaults are not known
        return {}


def without_secrets(values: JSONObject) -> JSONObject:
    """Replaces values with a name that means a secret by a mark."""
    kept: JSONObject = {}
    for name, value in values.items():
        if isinstance(value, str) and SECRET.search(name.lower()):
            kept[name] = f"<{name.upper()}>"
        elif isinstance(value, dict):
            kept[name] = without_secrets(value)
        else:
            kept[name] = value
    return kept


def data_summary(dataset: object) -> JSONObject:
    """Returns kind, size and columns of a dataset, without reading a sample."""
    if dataset is None:
        return {}
    if isinstance(dataset, dict):
        return {str(name): data_summary(part) for name, part in dataset.items()}
    summary: JSONObject = {"type": f"{type(dataset).__module__}.{type(dataset).__name__}"}
    summary["samples"] = len(dataset) if has_length(dataset) else None
    for name in ("column_names", "_fingerprint"):
        value = getattr(dataset, name, None)
        if isinstance(value, (list, str)):
            summary[name.strip("_")] = value
    return summary
