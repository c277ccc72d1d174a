"""Comparison of several runs, from their journals: where losses part, curves over each other, differing arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from trainwright.journal.record import Record, read
from trainwright.report.page import NUM_POINTS, Curve, Marker, document, figure, grid, readable, table
from trainwright.report.run_page import NOT_DRAWN, facts
from trainwright.report.run_table import OTHER_ROWS, differing_arguments, is_comparable
from trainwright.support.metric_order import order_metrics

TOLERANCE = 1e-6  # relative difference that rounding may cause


def read_runs(runs: Sequence[str | Path]) -> dict[str, Record]:
    """Returns the records of runs by the names of their directories.

    Directories of the same name have those above them in their names too, and a run that is named twice has a number.
    """
    names = _distinct_names([Path(run).resolve().parts for run in runs])
    numbered = [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]
    return dict(zip(numbered, map(read, runs), strict=True))


def _distinct_names(places: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the end of each path, of as many parts as it takes to tell it from the other paths."""
    found = []
    for place in places:
        others = [other for other in places if other != place]
        lengths = range(1, len(place))
        length = next((n for n in lengths if all(other[-n:] != place[-n:] for other in others)), len(place))
        found.append("/".join(place[-length:]))
    return found


def comparison(records: dict[str, Record], *, tolerance: float = TOLERANCE) -> str:
    """Returns the page as text."""
    parting = first_difference(records, tolerance)
    marks = [] if parting is None else [Marker(parting, "the losses diverge")]
    names = dict.fromkeys(name for record in records.values() for name in record.values)
    shared = [
        name
        for name in names
        if sum(len(record.values.get(name, ())) > 1 for record in records.values()) > 1
        and not name.endswith((*NOT_DRAWN, "_per_second"))
    ]
    shared = order_metrics(shared)
    shared.sort(key=lambda name: (name != "loss", not name.endswith("loss"), not name.startswith("eval_")))
    num_points = NUM_POINTS // max(len(shared) * len(records), 1)
    charts = []
    for name in shared:
        # Overlapping curves all stay visible: later curves are thinner, and each has its own dash pattern.
        curves = [
            Curve(label, *record.series(name), dash=i % 4, width=max(5 - 1.5 * i, 2))
            for i, (label, record) in enumerate(records.items())
        ]
        is_loss = name == "loss"
        charts.append(
            figure(
                readable(name),
                curves,
                marks=marks if is_loss else (),
                is_wide=is_loss,
                explains=is_loss,
                height=320 if is_loss else 220,
                num_points=num_points,
            )
        )
    said = "are the same at every step" if parting is None else f"differ for the first time at step {parting}"
    about = {label: {name: value for name, value, _ in facts(record, label)} for label, record in records.items()}
    rows = dict.fromkeys(name for found in about.values() for name in found)
    differing = differing_arguments(records)
    heading = ("", *records)
    others = "" if is_comparable(records) else f" The runs were {OTHER_ROWS}."
    return document(
        " / ".join(records),
        [
            grid(
                [
                    table(
                        "Where the losses diverge",
                        [(" and ".join(found.runs), found) for found in partings(records, tolerance)],
                    ),
                    *charts,
                    table(
                        "Runs",
                        [heading, *((name, *(found.get(name, "") for found in about.values())) for name in rows)],
                    ),
                    table(
                        "What differs",
                        [heading, *((name, *values) for name, values in differing.items())] if differing else [],
                    ),
                ]
            )
        ],
        note=f"The losses {said} (to {tolerance:g}, relative).{others}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDivergence:
    """First difference of the losses of two runs."""

    runs: tuple[str, str]
    num_shared_steps: int  # steps that both logged
    parts_at_step: int | None = None  # the first of them at which the losses differ
    losses: tuple[float, float] | None = None  # at that step

    def __str__(self) -> str:
        if not self.num_shared_steps:
            return "no step that both logged"
        if self.losses is None:
            steps = "the step" if self.num_shared_steps == 1 else f"all {self.num_shared_steps} steps"
            return f"the same losses at {steps} that both logged"
        return f"diverge at step {self.parts_at_step}: {self.losses[0]:.7g} and {self.losses[1]:.7g}"


def partings(records: dict[str, Record], tolerance: float = TOLERANCE) -> list[LossDivergence]:
    """Returns for each pair of runs where their losses part: by more than `tolerance`, relative."""
    series = {name: dict(zip(*record.series("loss"), strict=True)) for name, record in records.items()}
    found = []
    for pair in combinations(series, 2):
        one, other = (series[name] for name in pair)
        shared = sorted(one.keys() & other.keys())
        differing = (step for step in shared if not _is_same(one[step], other[step], tolerance))
        step = next(differing, None)
        losses = None if step is None else (one[step], other[step])
        found.append(LossDivergence(runs=pair, num_shared_steps=len(shared), parts_at_step=step, losses=losses))
    return found


def _is_same(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance) or (math.isnan(one) and math.isnan(other))


def first_difference(records: dict[str, Record], tolerance: float = TOLERANCE) -> int | None:
    """Returns the first step at which the losses of any two runs differ."""
    steps = [found.parts_at_step for found in partings(records, tolerance) if found.parts_at_step is not None]
    return min(steps, default=None)
