"""Several runs on one page: curves over each other, differing arguments, and where the losses part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainwright.journal.record import Record, read
from trainwright.report.run_page import NOT_DRAWN, Curve, document, figure, flat, table

TOLERANCE = 1e-6  # relative: what rounding may differ by


def write_comparison(runs: Sequence[str | Path], output: str | Path = "comparison.html") -> Path:
    """Writes the comparison of two runs or more (their output directories) and returns where."""
    records = {name: read(run) for name, run in zip(names_of(runs), runs, strict=True)}
    path = Path(output)
    path.write_text(comparison(records), encoding="utf-8")
    return path


def names_of(runs: Sequence[str | Path]) -> list[str]:
    """Last parts of the paths, with numbers where two are alike."""
    names = [Path(run).resolve().name for run in runs]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


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
        first, *others = (losses[step] for losses in series)
        if not all(is_same(first, other) for other in others):
            return step
    return None


def is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))


def differing_arguments(records: dict[str, Record]) -> dict[str, list[object]]:
    """Name -> the value in each run, of the arguments that are not the same in all; where a run writes is left out."""
    given = []
    for record in records.values():
        starts = [*record.of("start"), *record.of("resume")]
        given.append(dict(flat(starts[-1].get("arguments", {}) if starts else {})))
    names = dict.fromkeys(name for arguments in given for name in arguments if name != "output_dir")
    values = {name: [arguments.get(name) for arguments in given] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found[1:])}
