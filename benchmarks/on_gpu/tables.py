"""Tables of the lines that cells wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import print_table

COLUMNS = {
    "tokens_per_second": "tokens/s",
    "ratio": "of hand",
    "mfu": "MFU",
    "peak_gib": "peak GiB",
    "planned_gib": "planned",
    "waits_per_step": "waits",
}
STALL_COLUMNS = {
    "step_ms": "step, ms",
    "log_ms": "log, ms",
    "save_blocked_ms": "save blocks, ms",
    "save_lost_ms": "lost in all, ms",
    "save_lost_steps": "in steps",
    "evaluation_ms": "evaluation, ms",
}


def lines_of(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """What was found last for each cell; a cell that failed later keeps its figures. Plans are added to their cells."""
    found: dict[str, dict[str, Any]] = {}
    planned: dict[str, Any] = {}
    for path in paths:
        for line in map(json.loads, path.read_text().splitlines()):
            if "planned_gib" in line:
                planned[line["cell"]] = line["planned_gib"]
            elif "failed" not in line or line["cell"] not in found:
                found[line["cell"]] = line
    for name, line in found.items():
        line["planned_gib"] = planned.get(name)
    return found


def print_tables(found: dict[str, dict[str, Any]]) -> None:
    """One table of all jobs, one of stalls; cells have names of a job and a subject."""
    machine = found.get("machine", {})
    print("; ".join(f"{name} {value}" for name, value in machine.items() if name in MACHINE))
    rows = [["job", "subject", *COLUMNS.values()]]
    stalls = [["subject", *STALL_COLUMNS.values()]]
    turns = [["in turns", "subject", "ms a step", "of hand", "min", "max"]]
    for name, line in found.items():
        job, _, subject = name.partition(" | ")
        if subject == "in turns":
            for one in ("hand", "transformers", "trainwright"):
                values = line.get(one, {"failed": line.get("failed")})
                turns.append([job, one, *values_of(values, {key: key for key in ("ms_per_step", "ratio", "min", "max")})])
        elif job == "stalls":
            stalls.append([subject, *values_of(line, STALL_COLUMNS)])
        elif subject:
            hand = found.get(f"{job} | hand", {}).get("tokens_per_second")
            own = line.get("tokens_per_second")
            ratio = round(own / hand, 3) if hand and own else None
            rows.append([job, subject, *values_of(line | {"ratio": ratio}, COLUMNS)])
    for table in (rows, turns, stalls):
        if len(table) > 1:
            print()
            print_table(table)


MACHINE = ("device", "driver", "cuda", "torch", "transformers", "accelerate", "trainwright", "python", "date")


def values_of(line: dict[str, Any], columns: dict[str, str]) -> list[str]:
    """The texts of a line, or where it has no figures the reason."""
    if "failed" in line:
        return [line["failed"], *("" for _ in [*columns][1:])]
    return ["" if line.get(name) is None else str(line[name]) for name in columns]
