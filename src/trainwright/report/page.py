"""Parts of all pages: document, tiles, charts, tables. A page holds all that it needs, and asks no address.

uPlot (MIT licence, in `assets`) draws the charts in the browser, from JSON in the page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainwright._types import printable
from trainwright.support.html_table import cell_text, html_section, html_table

ASSETS = Path(__file__).parent / "assets"
NUM_POINTS = 50_000  # points of all curves of a page, which keeps it below 1.5 MB
FEWEST_POINTS = 100  # points that each curve keeps
NARROW = '<section class="card">'
WIDE = '<section class="card wide">'
WORDS = {
    "eval": "evaluation",
    "lr": "learning rate",
    "grad": "gradient",
    "num": "number of",
    "std": "standard deviation",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve, and how it is drawn."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dash: int = 0  # pattern: 0 is a solid line
    width: float = 2
    line: str = ""  # "steps", or "" for a line (in a chart of points: none)
    color: int | None = None  # by default that of its place in the chart
    text: Sequence[str] | None = None  # text of each point, in place of the name


@dataclass(frozen=True, slots=True)
class Marker:
    """An event at a step; the page knows how to draw "checkpoint", "best checkpoint", "resumed" and "incident"."""

    step: float
    kind: str
    text: str = ""


def document(title: str, sections: Iterable[str], *, note: str = "", refresh_s: int | None = None) -> str:
    """Returns a page that reloads itself every `refresh_s` seconds, if that is given."""
    style, library, licence, script = (
        (ASSETS / name).read_text(encoding="utf-8").strip()
        for name in ("page.css", "uPlot.iife.min.js", "uPlot.LICENSE", "page.js")
    )
    style += (ASSETS / "uPlot.min.css").read_text(encoding="utf-8")
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">'
    tools = "".join(f'<button data-smoothing="{strength}">{strength or "off"}</button>' for strength in (0, 0.6, 0.9))
    body = "\n".join(sections)
    smoothing = f'<div class="tools">Smoothing {tools}</div>' if '"smooth": true' in body else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{refresh}<title>{cell_text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{style}</style></head>\n<body><main><header><div><h1>{cell_text(title)}</h1>"
        f'<p class="soft">{cell_text(note)}</p></div>{smoothing}</header>\n{body}\n</main>\n'
        f"<script>/*! {licence} */\n{library}</script>\n<script>{script}</script></body></html>\n"
    )


def tiles(facts: Iterable[tuple[str, str, str]]) -> str:
    """Returns the headline of a page: label, value and note of each fact that has a value."""
    shown = ""
    told = [fact for fact in facts if fact[1]]
    # As many in a row that the last row is full, or has more than one.
    in_a_row = min((4, 5, 3), key=lambda number: (len(told) % number == 1, -len(told) % number))
    for label, value, note in told:
        broken = re.sub(r"(?<=[a-z])(?=[A-Z])", "<wbr>", cell_text(value))  # a long class name, between its words
        size = ' class="long"' if len(value) > 16 else ""
        notes = f"<dt>{cell_text(label)}</dt><dd{size}>{broken}</dd><dd>{cell_text(note)}</dd>"
        data = f'data-label="{cell_text(label)}" data-value="{cell_text(value)}"'
        shown += f'<dl class="tile" {data}>{notes}</dl>'
    return f'<div class="tiles" style="--in-a-row: {in_a_row}">{shown}</div>'


def grid(cards: Iterable[str], kind: str = "grid") -> str:
    """Returns cards side by side: in rows, or if `kind` is "columns" one below the other, in two columns."""
    shown = [card for card in cards if card]
    are_narrow = [one.startswith(NARROW) for one in shown]
    for i, is_narrow in enumerate(are_narrow):
        is_first = is_narrow and not (i and are_narrow[i - 1])
        following = are_narrow[i:].index(False) if False in are_narrow[i:] else len(are_narrow) - i
        # Of an odd number side by side, the first is wide: it is the one that matters most.
        if is_first and following % 2:
            shown[i] = shown[i].replace(NARROW, WIDE, 1)
    return f'<div class="{kind}">' + "\n".join(shown) + "</div>"


def card(title: str, body: str, *, is_wide: bool = True, tools: str = "") -> str:
    """Returns a section with a heading and `tools` next to it."""
    head = f'<div class="head"><h2>{cell_text(title)}</h2>{tools}</div>'
    return f"{WIDE if is_wide else NARROW}{head}{body}</section>"


def table(title: str, rows: Sequence[Sequence[object]], *, is_wide: bool = True, is_folded: bool = False) -> str:
    """Returns a table; nothing without rows."""
    if not rows:
        return ""
    if is_folded:
        return f"{WIDE}{html_section(title, html_table(rows), is_folded=True)}</section>"
    return card(title, f'<div class="scroll">{html_table(rows)}</div>', is_wide=is_wide)


def shares(title: str, parts: Sequence[tuple[str, float, str]], *, note: str = "") -> str:
    """Returns one stacked bar of parts: name, size, size as text."""
    total = sum(size for _, size, _ in parts)
    if total <= 0:
        return ""
    bar = ""
    legend = ""
    for i, (name, size, text) in enumerate(parts):
        shown = cell_text(f"{name}: {text}, {size / total:.1%}")
        color = f"background:var(--c{i % 8})"
        bar += f'<span style="flex:{size / total:.5f} 0 0;{color}" title="{shown}"></span>'
        legend += f'<span><i style="{color}"></i>{shown}</span>'
    note = f'<p class="soft">{cell_text(note)}</p>' if note else ""
    return card(title, f'<div class="bar">{bar}</div><div class="legend">{legend}</div>{note}')


def figure(
    title: str,
    curves: Sequence[Curve],
    *,
    marks: Sequence[Marker] = (),
    is_wide: bool = False,
    explains: bool = False,
    height: int = 220,
    num_points: int = NUM_POINTS,
    xname: str = "step",
    labels: Sequence[str] | None = None,
    log_x: bool = False,
    points: bool = False,
) -> str:
    """Returns a chart: values beneath the pointer, zoom by dragging, a logarithmic axis.

    `explains`: its legend names the kinds of marks. `num_points`: maximum for each curve. `labels`: the
    categories of the other axis, by number from 0. `points`: points, not lines.
    """
    drawn = []
    for curve in curves:
        x, y = thinned(curve.x, curve.y, num_points)
        texts = None if curve.text is None else [printable(text) for text in curve.text]
        drawn.append(asdict(replace(curve, name=printable(curve.name), text=texts)) | {"x": x, "y": y})
    spec = {
        "title": printable(title),
        "curves": drawn,
        "marks": [asdict(replace(mark, text=printable(mark.text))) for mark in marks],
        "explains": explains,
        "height": height,
        "xname": xname,
        "labels": None if labels is None else [printable(label) for label in labels],
        "log_x": log_x,
        "points": points,
        "smooth": xname == "step",
    }
    text = json.dumps(spec, allow_nan=False).replace("<", "\\u003c")
    plot = f'<div class="plot"><script type="application/json">{text}</script></div>'
    return card(title, plot, is_wide=is_wide, tools=f'<button data-log="{cell_text(title)}">log</button>')


def thinned(x: Sequence[float], y: Sequence[float | None], num_points: int) -> tuple[list[float], list[float | None]]:
    """Returns at most about `num_points` of a curve, so that its peaks stay; a value that is not finite is None."""
    values = [float(f"{value:.7g}") if value is not None and math.isfinite(value) else None for value in y]
    num_points = max(num_points, FEWEST_POINTS)
    if len(x) <= num_points:
        return list(x), values
    size = math.ceil(2 * len(x) / num_points)
    kept = list[int]()
    for begin in range(0, len(x), size):
        finite = [(value, i) for i, value in enumerate(values[begin : begin + size], begin) if value is not None]
        kept += sorted({min(finite)[1], max(finite)[1]}) if finite else [begin]
    return [x[i] for i in kept], [values[i] for i in kept]


def readable(name: str) -> str:
    """Returns a name for people: `grad_norm` is "Gradient norm"."""
    words = " ".join(WORDS.get(word, word) for word in name.replace("/", "_").split("_"))
    return words[:1].upper() + words[1:]
