"""Report of a run, or of a search, as one HTML file; once, or repeatedly until the run ends."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from trainwright._types import write_text
from trainwright.journal.entries import list_kinds, list_parts
from trainwright.journal.forms import Entry, last_start
from trainwright.journal.record import Record, flat, number, read
from trainwright.report.page import (
    NUM_POINTS,
    Curve,
    Marker,
    card,
    document,
    figure,
    grid,
    readable,
    shares,
    table,
    tiles,
)
from trainwright.report.run_table import (
    STOPPED,
    collect_metrics,
    find_best,
    list_origins,
    origin_text,
    summary,
)
from trainwright.search.search_record import SEARCH_NAME, SearchRecord
from trainwright.support.html_table import PageSection, lines_text
from trainwright.support.metric_order import order_metrics
from trainwright.support.units import count_text, duration_text, size_text

WATCH_S = 5  # from one version of a page to the next
# Not drawn: values that only grow, times of evaluations, and the sums of a run. A table has them.
NOT_DRAWN = (
    "epoch",
    "total_flos",
    "step",
    "num_input_tokens_seen",
    "_runtime",
    "_steps_per_second",
    "train_samples_per_second",
    "train_tokens_per_second",
)
BY_SOURCE = ("loss", "tokens", "samples")  # values of a mixture's sources, logged as loss/<source> and so on
LAST = ("Evaluation speed, samples/s", "Memory, bytes")  # charts at the end of the page
# Kinds of entries that are written as they happen, and the activity of the time before each.
TIMED = {"start": "", "resume": "", "log": "training", "evaluation": "evaluation", "save": "saving"}
PHASES = {
    "data": "Data",
    "host_to_device": "Data",
    "waiting": "Waiting for processes",
    "training": "Training",
    "forward": "Forward pass",
    "backward": "Backward pass",
    "optimizer": "Optimizer",
    "evaluation": "Evaluation",
    "saving": "Saving",
    "logging": "Logging and callbacks",
    "callbacks": "Logging and callbacks",
}
COUNTED = "Losses since the last log"  # an incident that sums up incidents with entries of their own, if guarded


def write_report(run: str | Path, output: str | Path | None = None, *, watch: bool = False) -> Path:
    """Writes the report of a run or a search, and returns its path.

    Args:
        run: the directory, or the journal.
        output: file to write; None: `report.html` in the directory of the journal.
        watch: returns when the run has ended; until then the page is written again whenever the journal is, and loads
            itself again.
    """
    run = Path(run)
    folder = run if run.is_dir() else run.parent
    path = folder / "report.html" if output is None else Path(output)
    title = folder.resolve().name
    if (run / SEARCH_NAME).is_file():
        from trainwright.report.search_page import search_page

        write_text(path, search_page(SearchRecord.read(run), title=title))
        return path
    while True:
        record = read(run)
        is_alive = watch and summary(record, title).state.startswith("running")
        write_text(path, page(record, title=title, refresh_s=WATCH_S if is_alive else None))
        if not is_alive:
            return path
        time.sleep(WATCH_S)


def page(record: Record, *, title: str, refresh_s: int | None = None) -> str:
    """Returns the page as text."""
    start = last_start(record)
    environment = start.get("environment", {})
    began = [datetime.fromtimestamp(start["time"]).strftime("%d %B %Y, %H:%M")] if "time" in start else []
    versions = [f"{name} {environment.get('packages', {}).get(name, '')}" for name in ("trainwright", "torch")]
    note = " · ".join([*began, environment.get("device", ""), *versions]) if environment else ""
    cards = [*charts(record), time_bar(record), *tables(record)]
    return document(title, [tiles(facts(record, title)), grid(cards)], note=note, refresh_s=refresh_s)


def facts(record: Record, title: str) -> Iterator[tuple[str, str, str]]:
    """Yields the headline facts: label, value, note."""
    run = summary(record, title)
    start = last_start(record)
    best = find_best(record)
    state, _, error = run.state.partition(": ")
    yield "State", state.capitalize(), f"step {run.steps.replace('/', ' of ')}" + (f", {error}" if error else "")
    for origin in run.origins[-1:]:
        older = "; ".join(f"itself of {origin_text(one)}" for one in run.origins[-2:-1])
        yield "Branch of", origin_text(origin), older
    losses = [value for value in record.series("loss")[1] if math.isfinite(value)]
    doubts = "".join(f", {name}" for name in run.findings)  # beside the metric: a leak makes it worthless
    if best is not None:
        others = [name for name in collect_metrics(record, best) if name != best.name and not name.endswith("loss")]
        for name in others[:1]:  # metric of the task
            yield readable(name), f"{collect_metrics(record, best)[name]:.4g}", f"at step {best.step}{doubts}"
        yield f"Best {readable(best.name).lower()}", f"{best.value:.4g}", f"at step {best.step}{doubts}"
    elif losses:
        yield "Loss", f"{losses[-1]:.4g}", "last logged"
    num_resumes = len(record.of("resume"))
    if num_resumes > 1:
        resumed = f"resumed {num_resumes} times"
    elif num_resumes == 1:
        resumed = "resumed once"
    else:
        resumed = "in one go"
    yield "Duration", duration_text(run.seconds), resumed
    speed, unit = throughput(record)
    rate = statistics.median([value for value in speed.y if value is not None] or [0.0])
    tokens = tokens_per_step(record) * rate / start.get("plan", {}).get("total_batch_size", 1)
    told = f"{count_text(tokens)} tokens/s" if tokens else "median while training"
    yield "Throughput", f"{count_text(rate)} {unit}" if rate else "", told
    peaks = [entry for entry in record.entries if "peak_memory_bytes" in entry]
    of_gpu = max((entry.get("peak_gpu_bytes", 0) for entry in peaks), default=0)
    peak = of_gpu or max((entry["peak_memory_bytes"] for entry in peaks), default=0)
    yield "Peak memory", size_text(peak) if peak else "", "tensors on the GPU" if of_gpu else "of the process"
    model = start.get("model", {})
    trained = model.get("trained_parameters", 0)
    size = model.get("parameters", 0)
    part = f", {count_text(trained)} of them trained" if trained != size else ""
    yield "Model", model.get("class", ""), f"{count_text(size)} parameters{part}"
    rows, held_out = (num_rows(start.get("data", {}).get(name, {})) for name in ("train", "eval"))
    yield "Data", f"{rows:,} rows" if rows else "", f"{held_out:,} to evaluate" if held_out else ""
    bad = len(incidents(record))
    num_warnings = len(warnings(record))
    yield "Incidents", str(bad), f"{num_warnings} warning{'s' * (num_warnings != 1)}" if num_warnings else "no warnings"


def num_rows(data: Entry) -> int:
    """Returns the rows of a dataset, or of several by name; 0 where none has a length."""
    parts = [data] if "samples" in data else [part for part in data.values() if isinstance(part, dict)]
    return sum(part.get("samples") or 0 for part in parts)


def throughput(record: Record) -> tuple[Curve, str]:
    """Returns the speed of training at each log, without the time of evaluations and saves, and its unit."""
    steps = list[float]()
    rates = list[float]()
    batch = None
    before = None
    for entry in record.entries:
        if entry["kind"] not in TIMED or "time" not in entry:
            continue
        batch = entry.get("plan", {}).get("total_batch_size", batch)
        if entry["kind"] == "log" and before is not None and entry["step"] > before["step"]:
            seconds = entry["time"] - before["time"]
            if seconds > 0:
                steps.append(entry["step"])
                rates.append((entry["step"] - before["step"]) * (batch or 1) / seconds)
        before = entry
    unit = "samples/s" if batch else "steps/s"
    return Curve(unit, steps, rates), unit


def tokens_per_step(record: Record) -> float:
    """Returns the mean number of tokens per step; 0 if they are not counted."""
    steps, tokens = record.series("num_input_tokens_seen")
    return (tokens[-1] - tokens[0]) / (steps[-1] - steps[0]) if len(steps) > 1 else 0.0


def incidents(record: Record) -> list[Entry]:
    """Returns the bad steps, each once."""
    found = record.of("incident")
    return [entry for entry in found if not entry["text"].startswith(COUNTED)] or found


def warnings(record: Record) -> list[Entry]:
    """Returns the warnings other than for bad steps, which repeat the text of an incident."""
    told = {entry["text"] for entry in record.of("incident")}
    return [entry for entry in record.warnings() if entry["text"] not in told]


def marks(record: Record) -> list[Marker]:
    """Returns the events of a run that its curves show."""
    saves = record.of("save")
    resumes = record.of("resume")
    best = str(saves[-1].get("best")) if saves else ""
    marked = [kind for kind, form in list_kinds().items() if form.is_marked]
    kinds = [
        ("best checkpoint" if best.endswith(f"checkpoint-{save['step']}") else "checkpoint", save["step"])
        for save in saves
    ]
    return [
        *(Marker(step, kind) for kind, step in kinds),
        *(Marker(entry["step"], "resumed") for entry in resumes),
        *(Marker(entry["step"], kind, entry["text"][:160]) for kind in marked for entry in record.of(kind)),
        *(Marker(entry["step"], "incident", entry["text"][:160]) for entry in incidents(record) if "step" in entry),
    ]


def charts(record: Record) -> Iterator[str]:
    """Yields the charts of a run, one per metric, with a curve for training and for each evaluation."""
    names = [
        name for name, data in last_start(record).get("data", {}).get("eval", {}).items() if isinstance(data, dict)
    ]
    groups: dict[str, list[Curve]] = {}
    colors = {label: i for i, label in enumerate(["training", *(f"evaluation {name}" for name in names)])}
    sources = dict.fromkeys(
        [*names, *(name.removeprefix("loss/") for name in record.values if name.startswith("loss/"))]
    )
    colors |= {"evaluation": 1, **{name: i for i, name in enumerate(sources, start=1)}}  # a source as its evaluation
    for name in order_metrics(record.values):
        steps, values = record.series(name)
        if len({value for value in values if math.isfinite(value)}) > 1 and not name.endswith(NOT_DRAWN):
            title, label = place(name, names)
            groups.setdefault(title, []).append(Curve(label, steps, values, color=colors.get(label)))
    tokens, samples = (groups.get(f"{what} by source", []) for what in ("Tokens", "Samples"))
    if tokens and [curve.y for curve in tokens] == [curve.y for curve in samples]:  # labels are no tokens
        del groups["Tokens by source"]
    events = marks(record)
    speed, unit = throughput(record)
    num_points = NUM_POINTS // (1 + sum(map(len, groups.values())))
    loss = groups.pop("Loss", None)
    lines = [mark for mark in events if "checkpoint" not in mark.kind]
    if loss:
        yield figure("Loss", loss, marks=events, is_wide=True, explains=True, height=300, num_points=num_points)
    if len(speed.x) > 1:
        groups[f"Throughput, {unit}"] = [speed]

    def order(title: str) -> tuple[bool, bool, bool, bool]:
        is_metric = title not in LAST and any("evaluation" in curve.name for curve in groups[title])
        is_last = title in LAST or title.startswith("Throughput")
        return is_last, not is_metric, not title.startswith("Loss"), len(groups[title]) < 2

    for title in sorted(groups, key=order):
        yield figure(title, groups[title], marks=lines, num_points=num_points)


def place(name: str, names: list[str]) -> tuple[str, str]:
    """Returns the chart of a logged value, and its curve there; `names`: of the evaluation datasets."""
    if "_mem_" in name:
        return LAST[1], readable(name).lower()
    rest = name.removeprefix("eval_")
    who = "training"
    if rest != name:
        dataset = next((one for one in sorted(names, key=len, reverse=True) if rest.startswith(f"{one}_")), "")
        rest = rest.removeprefix(f"{dataset}_") if dataset else rest
        who = f"evaluation {dataset}".rstrip()
    family, _, member = rest.partition("/")
    if not member:
        return (LAST[0] if rest == "samples_per_second" else readable(rest)), who
    if who != "training":
        member = f"{member}, {who}"
    elif family not in BY_SOURCE:
        member = readable(member).lower()
    return readable(family) + " by source" * (family in BY_SOURCE), member


def time_by_phase(record: Record) -> dict[str, float]:
    """Returns seconds by phase: as measured; by the journal's times if a process was killed or still runs."""
    total = defaultdict[str, float](float)
    seen = defaultdict[str, float](float)
    before = None
    for entry in [*record.entries, {"kind": "resume"}]:
        kind = entry["kind"]
        if kind in ("start", "resume"):
            for phase, seconds in seen.items():
                total[phase] += seconds
            seen = defaultdict(float)
            before = entry.get("time")
        elif kind == "time":  # later entries do not belong to the training
            seen = defaultdict(float, entry["time_by_phase"])
            before = None
        elif kind in TIMED and before is not None and "time" in entry:
            gap = entry["time"] - before
            before = entry["time"]
            times = [number(value) for name, value in entry.get("values", {}).items() if name.endswith("_runtime")]
            taken = sum(value for value in times if math.isfinite(value))
            inner = min(gap, taken) if kind == "evaluation" and taken else gap
            seen[TIMED[kind]] += inner
            seen["training"] += gap - inner
    return total


def time_bar(record: Record) -> str:
    """Returns the breakdown of time as one stacked bar."""
    seconds = defaultdict[str, float](float)
    for phase, value in time_by_phase(record).items():
        seconds[PHASES.get(phase.partition(".")[0], "Other")] += value
    names = dict.fromkeys([*PHASES.values(), "Other"])
    parts = [(name, seconds[name], duration_text(seconds[name])) for name in names if seconds[name] > 0]
    note = "Training: time of processes that were killed or are still running; their steps are not broken down."
    return shares("Where the time went", parts, note=note if seconds["Training"] else "")


def tables(record: Record) -> list[str]:
    """Returns the sections of the page that are no curves."""
    start = last_start(record)
    shown = [*incidents(record), *record.of("failed"), *warnings(record)]
    best = [mark.step for mark in marks(record) if mark.kind == "best checkpoint"]
    events = [
        (
            f"step\u00a0{entry['step']}",
            f"resumed from {entry.get('checkpoint', '')}"
            if entry["kind"] == "resume"
            else "saved" + ", the best" * (entry["step"] in best),
        )
        for entry in record.entries
        if entry["kind"] in ("save", "resume")
    ]
    parts = [
        table(
            "Incidents and warnings",
            [
                (f"step\u00a0{entry['step']}", entry.get("text") or ended(entry))
                for entry in sorted(shown, key=lambda entry: entry["step"])
            ],
        ),
        *(show_section(section) for part in list_parts() for section in part.sections(record)),
        *(
            card(f"Traceback of step {entry['step']}", f"<pre>{lines_text(entry.get('traceback', ''))}</pre>")
            for entry in record.of("failed")
            if entry.get("error") not in STOPPED
        ),
        grid(
            [
                table("Branch of", [(origin_text(one), one["checkpoint"]) for one in list_origins(record)]),
                table("Checkpoints and resumes", events),
                table("Arguments that differ from the defaults", [*flat(start.get("changed", {})).items()]),
                table("Data", described(start.get("data", {}))),
                table(
                    "Environment",
                    [
                        (
                            name.removeprefix("packages.").removesuffix("_bytes"),
                            size_text(value) if name.endswith("_bytes") and isinstance(value, int) else value,
                        )
                        for name, value in flat(start.get("environment", {})).items()
                        if value is not None
                    ],
                ),
            ],
            "columns wide",
        ),
        table("All logged values", summarize_values(record), is_folded=True),
        table("All arguments", [*flat(start.get("arguments", {})).items()], is_folded=True),
    ]
    return [part for part in parts if part]


def show_section(section: PageSection) -> str:
    """Returns a section that a capability adds to the page; empty if it has no content."""
    return card(section.title, section.html) if section.html else table(section.title, section.rows)


def described(data: Entry, name: str = "") -> list[tuple[str, str]]:
    """Returns datasets by name: class, number of samples, and further facts from the journal."""
    inner = {f"{name} {key}".strip(): value for key, value in data.items() if isinstance(value, dict)}
    rows = [row for below, value in inner.items() for row in described(value, below)]
    known = {key: value for key, value in data.items() if not isinstance(value, dict) and value is not None}
    if "type" in known:
        size = f"{known['samples']:,} samples" if isinstance(known.get("samples"), int) else ""
        # A class of ours says nothing about the user's data.
        is_own = str(known["type"]).startswith("trainwright.")
        kind = "" if is_own else str(known["type"]).rpartition(".")[2]
        rows.insert(0, (name, ", ".join(filter(None, (size, kind)))))
    return rows + [
        (f"{name} {key}".strip(), str(value)) for key, value in known.items() if key not in ("type", "samples")
    ]


def ended(failed: Entry) -> str:
    """Returns in a line why a run ended early."""
    error = str(failed.get("error", ""))
    return f"stopped: {error}" if error in STOPPED else failed.get("traceback", error).strip().rpartition("\n")[2]


def summarize_values(record: Record) -> list[tuple[object, ...]]:
    """Returns the last, lowest and highest of each logged value."""
    rows: list[tuple[object, ...]] = []
    for name in record.values:
        values = [value for value in record.series(name)[1] if math.isfinite(value)]
        if values:
            rows.append((name, *(f"{value:.6g}" for value in (values[-1], min(values), max(values)))))
    return [("", "last", "lowest", "highest"), *rows] if rows else []
