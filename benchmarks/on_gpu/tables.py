"""Tables of the lines that cells wrote."""

from __future__ import annotations

import json
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
SUBJECTS = ("hand", "transformers", "trainwright")
TURNS = {"ms_per_step": "ms a step", "ratio": "of hand", "min": "min", "max": "max"}
STALL_COLUMNS = {
    "step_ms": "step, ms",
    "log_ms": "log",
    "save_blocked_ms": "save blocks",
    "save_lost_ms": "lost in all",
    "second_save_blocked_ms": "second save blocks",
    "second_save_lost_ms": "lost in all",
    "evaluation_ms": "evaluation",
}


MACHINE = ("device", "cuda", "torch", "transformers", "accelerate", "peft", "python", "date")


def cells_of(path: Path) -> dict[str, dict[str, Any]]:
    """What was found last for each cell of a file; a cell that failed later keeps its figures."""
    found: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if "cell" in line and ("failed" not in line or line["cell"] not in found):
            found[line["cell"]] = line
    return found


def print_tables(found: dict[str, dict[str, Any]], planned: dict[str, dict[str, Any]]) -> None:
    """Prints the tables of one machine: tokens a second and memory, steps in turns, stalls."""
    machine = found.get("machine", {})
    print(", ".join(f"{name} {machine[name]}" for name in MACHINE if machine.get(name) is not None))
    rows = [["job", "subject", *COLUMNS.values()]]
    turns = [["in turns", "subject", *TURNS.values()]]
    stalls = [["stalls", *STALL_COLUMNS.values()]]
    for name, line in found.items():
        job, _, subject = name.partition(" | ")
        if subject == "in turns":
            turns += [[job, one, *values_of(line.get(one, line), TURNS)] for one in SUBJECTS]
        elif job == "stalls":
            stalls.append([subject, *values_of(line, STALL_COLUMNS)])
        elif subject:
            hand = found.get(f"{job} | hand", {}).get("tokens_per_second")
            own = line.get("tokens_per_second")
            more = {"ratio": round(own / hand, 3) if hand and own else None, **planned.get(name, {})}
            rows.append([job, subject, *values_of(line | more, COLUMNS)])
    for table in (rows, turns, stalls):
        if len(table) > 1:
            print()
            print_table(table)


def values_of(line: dict[str, Any], columns: dict[str, str]) -> list[str]:
    """The texts of a line, or where it has no figures the reason, in the last column."""
    if "failed" in line:
        return [*("" for _ in [*columns][1:]), line["failed"]]
    return ["" if line.get(name) is None else str(line[name]) for name in columns]
