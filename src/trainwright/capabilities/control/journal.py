"""Commands of a live run in the journal, which another run may repeat."""

from __future__ import annotations

from trainwright.journal.forms import EntryForm, JournalPart, parse_text

COMMAND = EntryForm(
    fields={"text": parse_text, "name": parse_text},
    required=("step", "text", "name"),
    is_of_a_step=True,
    is_marked=True,
)
JOURNAL = JournalPart(kinds={"command": COMMAND})
