"""Slow processes, and the times of all of them, in the journal and in a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.journal.forms import Entries, EntryForm, JournalPart, mapping, sequence
from trainwright.support.door import parse_number
from trainwright.support.html_table import PageSection

PLACE = ("rank", "host", "device")


def parse_times(value: Any) -> None:
    """Checks the times of the processes, which all have the same phases."""
    sequence(mapping(), *PLACE)(value)
    for row in value:
        if row.keys() != value[0].keys():
            raise ValueError
        for name in row.keys() - {*PLACE}:
            parse_number(row[name])


def show_processes(record: Entries) -> Sequence[PageSection]:
    """Returns the times of a step by process, the slowest first; nothing for a run of one process."""
    found = record.of("processes")
    rows = found[-1]["milliseconds_a_step"] if found else []
    if not rows:
        return ()
    phases = [name for name in rows[0] if name not in PLACE]
    header = ("", *(name.replace("_", " ") for name in phases))
    lines = [
        (f"{row['rank']} ({row['host']}, {row['device']})", *(f"{row[phase]:.1f}" for phase in phases)) for row in rows
    ]
    return (PageSection("Processes, milliseconds of a step", rows=(header, *lines)),)


JOURNAL = JournalPart(
    kinds={
        "slow_rank": EntryForm(is_of_a_step=True),
        "processes": EntryForm(fields={"milliseconds_a_step": parse_times}, required=("milliseconds_a_step",)),
    },
    sections=show_processes,
)
