"""Table of the runs below a directory, from their journals: state, best metric, steps, time."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainwright.journal.entries import list_parts
from trainwright.journal.forms import Entry, last_start
from trainwright.journal.record import JOURNAL_NAME, Record, flat, read
from trainwright.support.host import is_process_alive
from trainwright.support.metric_order import order_metrics

EVAL_ROWS = "eval_rows"  # in the recipe of a journal
OTHER_ROWS = "evaluated on different rows: the metrics are not comparable"
DEPTH = 4  # directories below the one asked about
NAMES_OF_RUNS = (
    "output_dir",
    "overwrite_output_dir",
    "run_name",
    "logging_dir",
    "hub_model_id",
    "resume_from_checkpoint",
    "branch_from",
)
MOST_SHOWN = 3  # metrics, and arguments, of a run in the table
STOPPED = ("SystemExit", "KeyboardInterrupt", "Interrupted")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run."""

    name: str
    metrics: dict[str, float]  # best evaluation
    arguments: dict[str, object]  # values that differ between the runs
    state: str
    steps: str  # steps done, and the total if known
    best: str  # name and value of the metric that decides which checkpoint is best
    seconds: float  # training time, without pauses between a stop and a resume
    written_at: float  # seconds since 1970
    findings: list[str]  # names of the checks that found something in data, model or settings
    origins: list[Entry]  # checkpoints of other runs that it comes from, the oldest first


def find_runs(folder: Path) -> list[RunSummary]:
    """The last run of each journal below a directory, the one written last first."""
    records = {}
    for path in _journals(folder, DEPTH):
        try:
            record = read(path)
        except (OSError, ValueError):
            continue
        name = path.parent.relative_to(folder).as_posix()
        records[folder.resolve().name if name == "." else name] = record
    differing = differing_arguments(records)
    found = [
        summary(record, name, arguments={argument: values[number] for argument, values in differing.items()})
        for number, (name, record) in enumerate(records.items())
    ]
    return sorted(found, key=lambda run: -run.written_at)


def _journals(folder: Path, depth: int) -> Iterator[Path]:
    """Yields the journals in a directory and below it; no link is followed there, to a directory or to a file."""
    try:
        has_journal = (folder / JOURNAL_NAME).is_file() and not (folder / JOURNAL_NAME).is_symlink()
        below = sorted(folder.iterdir()) if depth > 0 else []
    except OSError:  # a directory that cannot be read: the runs next to it are shown
        return
    if has_journal:
        yield folder / JOURNAL_NAME
    for inner in below:
        if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith((".", "checkpoint-")):
            yield from _journals(inner, depth - 1)


def summary(record: Record, name: str, *, arguments: Mapping[str, object] | None = None) -> RunSummary:
    """Returns the line of a run in a table of runs; `arguments`: values that differ from other runs."""
    starts = [entry for entry in record.entries if entry["kind"] in ("start", "resume")]
    last = starts[-1] if starts else {}
    steps = [entry.get("step", 0) for entry in record.entries if isinstance(entry.get("step"), int)]
    total = last.get("plan", {}).get("max_steps")
    best = find_best(record)
    return RunSummary(
        name=name,
        metrics=collect_metrics(record, best),
        arguments={argument: value for argument, value in (arguments or {}).items() if value is not None},
        state=_state(record.entries, last),
        steps=f"{max(steps, default=0)}" + (f"/{total}" if isinstance(total, int) and 0 < total < 1 << 60 else ""),
        best="" if best is None else f"{best.name} {best.value:.4g}",
        seconds=sum(_lengths(record.entries)),
        written_at=record.entries[-1].get("time", 0.0) if record.entries else 0.0,
        findings=list(dict.fromkeys(one["check"] for one in record.findings())),
        origins=list_origins(record),
    )


def _state(entries: list[Entry], last: Entry) -> str:
    since = entries[entries.index(last) + 1 :] if last else []
    for entry in reversed(since):
        if entry["kind"] == "failed":
            return "stopped" if entry.get("error") in STOPPED else f"failed: {entry.get('error', '')}"
        if entry["kind"] == "end":
            return "finished"
    process = last.get("process") or {}
    if not process or process.get("host") != socket.gethostname():
        return "running or killed"
    try:
        is_running = is_process_alive(process["pid"], began=process["began"])
    except (KeyError, TypeError, ValueError, OverflowError):
        is_running = False
    return "running" if is_running else "killed"


def list_origins(record: Record) -> list[Entry]:
    """Returns the checkpoints of other runs that a run comes from, the oldest first."""
    return [origin for part in list_parts() for origin in part.origins(record)]


def origin_text(origin: Entry) -> str:
    """Returns an origin in words: `stable, step 8000`."""
    return f"{Path(origin['checkpoint']).parent.name}, step {origin['step']}"


def differing_arguments(records: Mapping[str, Record]) -> dict[str, list[object]]:
    """Returns name -> value in each run for what differs: task, model, data, adapter, and arguments.

    Names and directories of runs are left out.
    """
    given = [_recipe(record) | flat(last_start(record).get("arguments", {})) for record in records.values()]
    names = dict.fromkeys(name for arguments in given for name in arguments if name not in NAMES_OF_RUNS)
    values = {name: [arguments.get(name) for arguments in given] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found[1:])}


def _recipe(record: Record) -> dict[str, object]:
    found = last_start(record).get("recipe", {})
    return {name: value for name, value in found.items() if name != EVAL_ROWS}


def is_comparable(records: Mapping[str, Record]) -> bool:
    """Returns False if the metrics of runs are from different rows, as far as their journals say."""
    known = [one for one in map(_evaluated_on, records.values()) if one is not None]
    return all(one == known[0] for one in known[1:])


def _evaluated_on(record: Record) -> object:
    """Returns what tells the evaluation rows of a run; None if nothing does."""
    start = last_start(record)
    data = start.get("data", {}).get("eval", {})
    return start.get("recipe", {}).get(EVAL_ROWS) or data.get("fingerprint") or data.get("samples")


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of the metric that decides which checkpoint is best."""

    name: str
    value: float
    step: int


def find_best(record: Record) -> Best | None:
    """Returns the best evaluation: by `metric_for_best_model`, or else the (first) loss of an evaluation."""
    starts = [entry for entry in record.entries if entry["kind"] in ("start", "resume")]
    arguments = starts[-1].get("arguments", {}) if starts else {}
    name = f"eval_{(arguments.get('metric_for_best_model') or 'loss').removeprefix('eval_')}"
    if name not in record.values:
        name = next((one for one in record.values if one.startswith("eval_") and one.endswith("_loss")), name)
    scored = [(value, step) for step, value in zip(*record.series(name), strict=True) if math.isfinite(value)]
    if not scored:
        return None
    greater = arguments.get("greater_is_better")
    is_greater = not name.endswith("loss") if greater is None else greater
    value, step = max(scored, key=lambda one: (one[0], -one[1])) if is_greater else min(scored)
    return Best(name.removeprefix("eval_"), value, step)


def collect_metrics(record: Record, best: Best | None) -> dict[str, float]:
    """Returns the metrics of the best evaluation, without prefix and times.

    The metric that decides comes first, and by-products of the training last.
    """
    if best is None:
        return {}
    found = {best.name: best.value}
    for name in order_metrics(record.values):
        if name.startswith("eval_") and not name.endswith(("_runtime", "_per_second")):
            steps, values = record.series(name)
            if best.step in steps:
                found.setdefault(name.removeprefix("eval_"), values[steps.index(best.step)])
    return found


def metric_texts(metrics: Mapping[str, float]) -> list[str]:
    """Returns the first metrics as they are shown: `accuracy 0.91`."""
    return [f"{name} {value:.4g}" for name, value in list(metrics.items())[:MOST_SHOWN]]


def argument_texts(arguments: Mapping[str, object]) -> list[str]:
    """Returns the first arguments as they are shown: `seed=2`."""
    return [f"{name}={value}" for name, value in list(arguments.items())[:MOST_SHOWN]]


def _lengths(entries: list[Entry]) -> Iterator[float]:
    """Returns the seconds from each start to the last entry before the next start."""
    began = last = None
    for entry in entries:
        when = entry.get("time")
        if not isinstance(when, (int, float)):
            continue
        if entry["kind"] in ("start", "resume"):
            if began is not None and last is not None:
                yield last - began
            began = when
        last = when
    if began is not None and last is not None:
        yield last - began


def ago(when: float, now: float) -> str:
    """`5 min ago`, in the largest unit of which there is more than one."""
    seconds = max(now - when, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def readable_time(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    whole = int(seconds)
    hours = whole // 3600
    minutes = whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
