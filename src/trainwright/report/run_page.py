"""HTML files that show a run, several for comparison (from their journals), or a search (from its record).

A file holds all that it needs and asks no address outside for anything.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainwright.errors import needs_package
from trainwright.html_table import html_table
from trainwright.journal.record import Record, flat, read
from trainwright.search.search_record import FINISHED, PRUNED, SEARCH_NAME, SearchRecord, TrialRecord, importance

SMOOTHING = (0.0, 0.6, 0.9)  # share of the running mean that the past has
NOT_DRAWN = ("epoch", "total_flos", "step")
STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #222; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } pre { overflow-x: auto; }
.incident { color: #a00; } td { overflow-wrap: anywhere; }
"""

# The page sends nothing anywhere, so the library's button that uploads a chart to its maker's cloud is not on it.
CONFIG = {"displaylogo": False, "showSendToCloud": False, "plotlyServerURL": "",
          "modeBarButtonsToRemove": ["sendChartToCloud", "sendDataToCloud", "select2d", "lasso2d"]}  # fmt: skip

Curve = tuple[str, Sequence[float], Sequence[float]]  # name, steps, values


def write_report(run: str | Path, output: str | Path | None = None) -> Path:
    """Writes the report of a run (its directory, or its journal) or a search, `report.html` beside it: the path."""
    run = Path(run)
    folder = run if run.is_dir() else run.parent
    path, title = folder / "report.html" if output is None else Path(output), folder.resolve().name
    is_search = (run / SEARCH_NAME).is_file()
    text = search_page(SearchRecord.read(run), title=title) if is_search else page(read(run), title=title)
    path.write_text(text, encoding="utf-8")
    return path


def page(record: Record, *, title: str) -> str:
    """Returns the page as text."""
    return document(title, [charts(record), *tables(record)])


def document(title: str, sections: Iterable[str]) -> str:
    shown = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{shown}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>\n<body><h1>{shown}</h1>\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def charts(record: Record) -> str:
    """The curves of a run; the library that draws them comes with the first."""
    drawn = [(f"{name}", *record.series(name)) for name in record.values if name not in NOT_DRAWN]
    curves: dict[str, Curve] = {name: (name, steps, values) for name, steps, values in drawn if len(steps) > 1}
    losses = [curve for name, curve in curves.items() if name == "loss" or name.endswith("_loss")]
    groups: list[tuple[str, list[Curve]]] = [("Loss", losses)]
    rest = {name: curve for name, curve in curves.items() if curve not in losses}
    speeds = [curve for name, curve in rest.items() if "per_second" in name or "runtime" in name]
    memory = [curve for name, curve in rest.items() if "_mem_" in name]
    groups += [("Throughput", speeds), ("Memory", memory)]
    others = [(name, curve) for name, curve in rest.items() if curve not in speeds and curve not in memory]
    groups += [(name.replace("_", " ").capitalize(), [curve]) for name, curve in others]
    figures = [
        figure(title, members, is_first=i == 0) for i, (title, members) in enumerate(groups) if members or i == 0
    ]
    return "\n".join(figures)


def figure(title: str, curves: Sequence[Curve], *, is_first: bool, marks: Sequence[tuple[float, str]] = ()) -> str:
    """A chart: values on hover, zoom by dragging, and menus for smoothing and a logarithmic axis."""
    chart = plotly().Figure()
    for strength in SMOOTHING:
        for name, steps, values in curves:
            chart.add_scatter(
                x=list(steps), y=smoothed(values, strength), name=name, mode="lines+markers", visible=strength == 0.0
            )
    for step, text in marks:
        chart.add_vline(x=step, line_dash="dot", annotation_text=text)
    num = len(curves)
    smoothing = [
        {"label": f"smoothing {strength:g}", "method": "update",
         "args": [{"visible": [i // max(num, 1) == chosen for i in range(num * len(SMOOTHING))]}]}
        for chosen, strength in enumerate(SMOOTHING)
    ]  # fmt: skip
    scales = [{"label": kind, "method": "relayout", "args": [{"yaxis.type": kind}]} for kind in ("linear", "log")]
    menus = [{"buttons": smoothing, "x": 0.8, "y": 1.2}, {"buttons": scales, "x": 1.0, "y": 1.2}]
    layout = {"xaxis_title": "step", "hovermode": "x unified", "showlegend": True, "updatemenus": menus}
    return drawn(chart, title, is_first=is_first, height=380, **layout)


def drawn(chart: Any, title: str, *, is_first: bool = False, **layout: object) -> str:
    """Returns a chart of plotly as HTML, with plotly itself in the first of a page."""
    chart.update_layout(title=title, template="plotly_white", **layout)
    return str(chart.to_html(include_plotlyjs=is_first, full_html=False, config=CONFIG))


def smoothed(values: Sequence[float], strength: float) -> list[float | None]:
    """A running mean, corrected for its start; what is not finite is a gap."""
    mean, weight, result = 0.0, 0.0, list[float | None]()
    for value in values:
        if not math.isfinite(value):
            result.append(None)
            continue
        mean, weight = strength * mean + (1 - strength) * value, strength * weight + (1 - strength)
        result.append(mean / weight)
    return result


def tables(record: Record) -> list[str]:
    """Returns the sections of the page that are no curves."""
    starts = [*record.of("start"), *record.of("resume")]
    last = starts[-1] if starts else {}
    times = (record.of("time") or [{}])[-1].get("time_by_phase", {})
    told = {entry["text"] for entry in record.of("incident")}  # the warning of a bad step has the same text
    total = sum(times.values())
    parts = [
        table("Where the time went", [(name, f"{s:.2f} s", f"{s / total:.1%}") for name, s in times.items()]),
        table("Incidents", [(entry.get("step", ""), entry.get("text") or entry.get("traceback", ""))
                            for entry in record.entries if entry["kind"] in ("incident", "failed")
                            or (entry["kind"] == "warning" and entry.get("text") not in told)]),
        table("Checkpoints", [(step, "best" if str(best).endswith(f"checkpoint-{step}") else "")
                              for step, best in ((save["step"], save.get("best")) for save in record.of("save"))]),
        table("Levers of speed", [
            (row["lever"], *(f"{name}={value}" for name, value in row["settings"].items()), row["ratio"] or "",
             row["proof"], row["result"])
            for row in next((e["levers"]["rows"] for e in starts if e.get("levers", {}).get("rows")), [])
        ]),
        table("Resumed", [(entry["step"], entry.get("checkpoint", "")) for entry in record.of("resume")]),
        table("Arguments that differ from the defaults", [*flat(last.get("changed", {})).items()]),
        table("Environment", [*flat(last.get("environment", {})).items()]),
        table("Data", [*flat(last.get("data", {})).items()]),
        table("All arguments", [*flat(last.get("arguments", {})).items()]),
    ]  # fmt: skip
    return [part for part in parts if part]


def table(title: str, rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    return f"<h2>{html.escape(title)}</h2>\n{html_table(rows)}"


def plotly() -> Any:
    """Returns the module of plotly's charts."""
    with needs_package("A report needs the package plotly: pip install 'trainwright[report]'"):
        from plotly import graph_objects
    return graph_objects


TOLERANCE = 1e-6  # relative: what rounding may differ by


def write_comparison(runs: Sequence[str | Path], output: str | Path = "comparison.html") -> Path:
    """Writes the comparison of two runs or more (their output directories) and returns where."""
    path = Path(output)
    path.write_text(comparison(read_runs(runs)), encoding="utf-8")
    return path


def read_runs(runs: Sequence[str | Path]) -> dict[str, Record]:
    """Returns the records of runs by the names of their directories, which are numbered where two are the same."""
    names = [Path(run).resolve().name for run in runs]
    numbered = [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]
    return dict(zip(numbered, map(read, runs), strict=True))


def comparison(records: dict[str, Record]) -> str:
    parting = first_difference(records)
    marks = [] if parting is None else [(parting, f"the losses part at step {parting}")]
    names = dict.fromkeys(name for record in records.values() for name in record.values if name not in NOT_DRAWN)
    shared = [name for name in names if sum(name in record.values for record in records.values()) > 1]
    charts: list[str] = []
    for name in sorted(shared, key=lambda name: (name != "loss", name)):
        curves: list[Curve] = [(label, *record.series(name)) for label, record in records.items()]
        if any(len(steps) > 1 for _, steps, _ in curves):
            charts.append(figure(name, curves, is_first=not charts, marks=marks if name == "loss" else ()))
    said = "are the same at every step" if parting is None else f"differ for the first time at step {parting}"
    differing = differing_arguments(records)
    return document(
        " / ".join(records),
        [f"<p>The losses {said} (to {TOLERANCE:g}, relative).</p>", *charts,
         table("Arguments that differ", [("", *records), *((name, *values) for name, values in differing.items())]
               if differing else [])],
    )  # fmt: skip


def first_difference(records: dict[str, Record]) -> int | None:
    """The first step, of those that all runs logged, at which their losses are not the same."""
    series = [dict(zip(*record.series("loss"), strict=True)) for record in records.values()]
    if not series:
        return None
    for step in sorted(set.intersection(*map(set, series))):
        losses = [of_run[step] for of_run in series]
        if not (all(map(math.isnan, losses)) or all(math.isclose(losses[0], x, rel_tol=TOLERANCE) for x in losses)):
            return step
    return None


def differing_arguments(records: dict[str, Record]) -> dict[str, list[object]]:
    """Name -> the value in each run, of the arguments that are not the same in all; where a run writes is left out."""
    given = []
    for record in records.values():
        starts = [*record.of("start"), *record.of("resume")]
        given.append(flat(starts[-1].get("arguments", {}) if starts else {}))
    names = dict.fromkeys(name for arguments in given for name in arguments if name != "output_dir")
    values = {name: [arguments.get(name) for arguments in given] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found[1:])}


COLOURS = {FINISHED: "#1f77b4", PRUNED: "#999999"}


def search_page(found: SearchRecord, *, title: str) -> str:
    """Returns the page as text."""
    sections: list[str] = []
    for number, direction in enumerate(found.directions):
        of = "" if len(found.directions) == 1 else f" {number + 1}"
        sections.append(_history(found, number, direction, title=f"History: objective{of}", is_first=number == 0))
        shares = importance(found.trials, number)
        sections.append(_bars(shares, title=f"Importance: share of objective{of} that each parameter explains alone"))
        sections += [_scatter(found.trials, name, number) for name in shares]
    best = [(one.id, ", ".join(map(_short, one.values)), *_settings(one)) for one in found.best()]
    sections.append(table("Best", best))
    rows = [("trial", "state", "objective", "parameters", "seconds", "error")]
    for one in found.trials:
        seconds, values = "" if one.seconds is None else f"{one.seconds:.1f}", ", ".join(map(_short, one.values))
        rows.append((one.id, one.state, values, ", ".join(_settings(one)), seconds, one.error or ""))
    sections.append(table("Trials", rows))
    return document(title, sections)


def _history(found: SearchRecord, number: int, direction: str, *, title: str, is_first: bool) -> str:
    """The objective of each trial, and the best so far."""
    chart = plotly().Figure()
    scored = [(i, one) for i, one in enumerate(found.trials) if _value(one, number) is not None]
    for state, colour in COLOURS.items():
        chosen = [(i, one) for i, one in scored if one.state == state]
        labels = [f"trial {one.id}" for _, one in chosen]
        places, values = [i for i, _ in chosen], [_value(one, number) for _, one in chosen]
        chart.add_scatter(x=places, y=values, name=state, mode="markers", marker_color=colour, text=labels)
    finished = [(i, one.values[number]) for i, one in scored if one.state == FINISHED]
    pick = min if direction == "minimize" else max
    so_far = [pick(value for _, value in finished[: n + 1]) for n in range(len(finished))]
    chart.add_scatter(x=[i for i, _ in finished], y=so_far, name="best so far", mode="lines", line_shape="hv")
    return drawn(chart, title, is_first=is_first, xaxis_title="trial", height=380)


def _bars(shares: dict[str, float], *, title: str) -> str:
    if not shares:
        return ""
    go = plotly()
    chart = go.Figure(go.Bar(x=list(shares.values()), y=list(shares), orientation="h"))
    return drawn(chart, title, xaxis_range=[0, 1], yaxis_autorange="reversed", height=160 + 30 * len(shares))


def _scatter(trials: Sequence[TrialRecord], name: str, number: int) -> str:
    go = plotly()
    done = [one for one in trials if one.state == FINISHED and name in one.params]
    values = [one.params[name] for one in done]
    heights, labels = [one.values[number] for one in done], [f"trial {one.id}" for one in done]
    chart = go.Figure(go.Scatter(x=values, y=heights, mode="markers", text=labels))
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    is_wide = len(numbers) == len(values) > 0 and min(numbers) > 0 and max(numbers) / min(numbers) >= 10
    return drawn(chart, name, xaxis_title=name, height=320, xaxis_type="log" if is_wide else None)


def _value(trial: TrialRecord, number: int) -> float | None:
    value = trial.values[number] if len(trial.values) > number else None
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _settings(trial: TrialRecord) -> list[str]:
    return [f"{name}={_short(value)}" for name, value in trial.params.items()]


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
