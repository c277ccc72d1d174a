"""The checkpoints that a run branches from, in the journal."""

from __future__ import annotations

from trainwright.journal.forms import Entries, Entry, JournalPart, last_start, mapping, parse_text, sequence
from trainwright.support.door import parse_step

ORIGIN = mapping(checkpoint=parse_text, step=parse_step)


def find_origins(record: Entries) -> list[Entry]:
    """Returns the checkpoints that a run branches from, the oldest first."""
    found = last_start(record).get("branch", {}).get("origins", [])
    return [one for one in found if isinstance(one, dict) and "checkpoint" in one and "step" in one]


JOURNAL = JournalPart(
    facts={"branch": mapping(origins=sequence(ORIGIN, "checkpoint", "step"))},
    origins=find_origins,
)
