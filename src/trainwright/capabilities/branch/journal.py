"""The checkpoints that a run branches from, in the journal; `report/run_table.py` reads them for tables of runs."""

from __future__ import annotations

from trainwright.journal.forms import JournalPart, mapping, parse_text, sequence
from trainwright.support.door import parse_step

ORIGIN = mapping(checkpoint=parse_text, step=parse_step)
JOURNAL = JournalPart(facts={"branch": mapping(origins=sequence(ORIGIN, "checkpoint", "step"))})
