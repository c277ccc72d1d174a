"""One HTML file that shows a search, from its record: how it went, which parameters mattered, every trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainwright.report.run_page import document, drawn, plotly, table
from trainwright.search.search_record import FINISHED, PRUNED, SEARCH_NAME, SearchRecord, TrialRecord, importance

COLOURS = {FINISHED: "#1f77b4", PRUNED: "#999999"}


def has_search(folder: str | Path) -> bool:
    """Returns True if a directory holds the record of a search."""
    return (Path(folder) / SEARCH_NAME).is_file()


def write_search_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Writes the report of the search in a directory: `report.html` in it, whose path it returns."""
    folder = Path(folder)
    path = folder / "report.html" if output is None else Path(output)
    path.write_text(search_page(SearchRecord.read(folder), title=folder.resolve().name), encoding="utf-8")
    return path


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
    rows += [(one.id, one.state, ", ".join(map(_short, one.values)), ", ".join(_settings(one)),
              "" if one.seconds is None else f"{one.seconds:.1f}", one.error or "")
             for one in found.trials]  # fmt: skip
    sections.append(table("Trials", rows))
    return document(title, sections)


def _history(found: SearchRecord, number: int, direction: str, *, title: str, is_first: bool) -> str:
    """The objective of each trial, and the best so far."""
    go = plotly()
    chart = go.Figure()
    scored = [(i, one) for i, one in enumerate(found.trials) if _value(one, number) is not None]
    for state, colour in COLOURS.items():
        chosen = [(i, one) for i, one in scored if one.state == state]
        labels = [f"trial {one.id}" for _, one in chosen]
        chart.add_scatter(x=[i for i, _ in chosen], y=[_value(one, number) for _, one in chosen], name=state,
                          mode="markers", marker_color=colour, text=labels)  # fmt: skip
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
    chart = go.Figure(go.Scatter(x=values, y=[one.values[number] for one in done], mode="markers",
                                 text=[f"trial {one.id}" for one in done]))  # fmt: skip
    return drawn(chart, name, xaxis_title=name, height=320, xaxis_type="log" if _spans_decades(values) else None)


def _spans_decades(values: Sequence[object]) -> bool:
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return len(numbers) == len(values) > 0 and min(numbers) > 0 and max(numbers) / min(numbers) >= 10


def _value(trial: TrialRecord, number: int) -> float | None:
    value = trial.values[number] if len(trial.values) > number else None
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _settings(trial: TrialRecord) -> list[str]:
    return [f"{name}={_short(value)}" for name, value in trial.params.items()]


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
