"""The measured settings of a run with `speed`, in the journal and in a report."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.journal.forms import Entries, Entry, JournalPart, mapping, sequence
from trainwright.support.html_table import PageSection


def show_levers(record: Entries) -> Sequence[PageSection]:
    """Returns the levers that were measured, with their gain and their proof."""
    chosen = (entry["levers"]["rows"] for entry in record.entries if entry.get("levers", {}).get("rows"))
    levers: list[Entry] = next(chosen, [])
    rows = [
        (
            row["lever"],
            *(f"{name}={value}" for name, value in row["settings"].items()),
            row["ratio"] or "",
            row["proof"],
            row["result"],
        )
        for row in levers
    ]
    return (PageSection("Levers of speed", rows=rows),)


LEVERS = mapping(rows=sequence(mapping(settings=mapping()), "lever", "settings", "ratio", "proof", "result"))
JOURNAL = JournalPart(facts={"levers": LEVERS}, sections=show_levers)
