"""Page of a search, from its record: history, importance of the parameters, every trial."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainwright.report.page import Curve, card, document, figure, grid, table
from trainwright.search.search_record import FINISHED, PRUNED, SearchRecord, TrialRecord, importance
from trainwright.support.html_table import cell_text
from trainwright.support.units import duration_text

COLORS = {FINISHED: 0, PRUNED: 7}


def search_page(found: SearchRecord, *, title: str) -> str:
    """Returns the page as text."""
    cards: list[str] = []
    for number, direction in enumerate(found.directions):
        of = "" if len(found.directions) == 1 else f" {number + 1}"
        cards.append(_history(found, number, direction, title=f"History: objective{of}"))
        influence = importance(found.trials, number)
        cards.append(_bars(influence, title=f"Importance: share of objective{of} that each parameter explains alone"))
        cards += [_scatter(found.trials, name, number, title=f"Objective{of} by {name}") for name in influence]
    best = [(one.id, ", ".join(map(_short, one.values)), *_settings(one)) for one in found.best()]
    rows = [("trial", "state", "objective", "parameters", "time", "error")]
    for one in found.trials:
        taken = "" if one.seconds is None else duration_text(one.seconds)
        values = ", ".join(map(_short, one.values))
        rows.append((one.id, one.state, values, ", ".join(_settings(one)), taken, one.error or ""))
    return document(title, [grid([*cards, table("Best", best), table("Trials", rows)])])


def _history(found: SearchRecord, number: int, direction: str, *, title: str) -> str:
    """The objective of each trial, and the best so far."""
    scored = [(i, one, value) for i, one in enumerate(found.trials) if (value := _value(one, number)) is not None]
    curves = []
    for state, color in COLORS.items():
        chosen = [(i, one, value) for i, one, value in scored if one.state == state]
        names = [f"trial {one.id}, {state}" for _, one, _ in chosen]
        curves.append(Curve(state, [i for i, *_ in chosen], [v for *_, v in chosen], color=color, text=names))
    finished = [(i, value) for i, one, value in scored if one.state == FINISHED]
    pick = min if direction == "minimize" else max
    so_far = [pick(value for _, value in finished[: n + 1]) for n in range(len(finished))]
    curves.append(Curve("best so far", [i for i, _ in finished], so_far, line="steps", color=1))
    curves = [curve for curve in curves if curve.x]
    return figure(title, curves, is_wide=True, height=260, xname="trial", points=True) if curves else ""


def _bars(influence: dict[str, float], *, title: str) -> str:
    rows = "".join(
        f'<tr><td>{cell_text(name)}</td><td><div class="bar"><span style="flex:{share:.4f} 0 0;background:var(--c0)">'
        f'</span><span style="flex:{1 - share:.4f} 0 0"></span></div></td><td>{share:.0%}</td></tr>'
        for name, share in influence.items()
    )
    return card(title, f'<table class="bars">{rows}</table>') if rows else ""


def _scatter(trials: Sequence[TrialRecord], name: str, number: int, *, title: str) -> str:
    done = [one for one in trials if one.state == FINISHED and name in one.params]
    given = [one.params[name] for one in done]
    numbers = [value for value in given if isinstance(value, (int, float)) and not isinstance(value, bool)]
    labels = None if len(numbers) == len(given) else list(dict.fromkeys(map(str, given)))
    places = numbers if labels is None else [labels.index(str(value)) for value in given]
    order = sorted(range(len(done)), key=places.__getitem__)
    curve = Curve(
        "objective",
        [places[i] for i in order],
        [done[i].values[number] for i in order],
        text=[f"trial {done[i].id}" for i in order],
    )
    spans_tens = labels is None and min(places) > 0 and max(places) / min(places) >= 10
    return figure(title, [curve], xname=name, labels=labels, log_x=spans_tens, points=True)


def _value(trial: TrialRecord, number: int) -> float | None:
    value = trial.values[number] if len(trial.values) > number else None
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _settings(trial: TrialRecord) -> list[str]:
    return [f"{name}={_short(value)}" for name, value in trial.params.items()]


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
