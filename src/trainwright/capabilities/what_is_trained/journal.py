"""What a run trains, in the journal and in a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.journal.forms import Entries, EntryForm, JournalPart, parse_switch, parse_text, sequence
from trainwright.support.html_table import PageSection, html_marked, lines_text


def parse_tokens(value: Any) -> None:
    """Checks the rows whose trained tokens are marked: each a list of texts, trained or not."""
    for row in value["examples"]:
        for text, is_trained in row:
            parse_text(text)
            parse_switch(is_trained)


def show_what_is_trained(record: Entries) -> Sequence[PageSection]:
    """Returns what the run trains, with the trained tokens of the first rows marked; nothing if that is not known."""
    found = record.of("what_is_trained")
    if not found:
        return ()
    lines = "".join(f"<p>{lines_text(text)}</p>" for text in found[-1]["text"])
    examples = "".join(map(html_marked, found[-1]["tokens"]["examples"]))
    return (PageSection("What is trained", html=lines + examples),)


ENTRY = EntryForm(
    fields={"text": sequence(parse_text), "tokens": parse_tokens},
    required=("step", "text", "tokens"),
    is_of_a_step=True,
)
JOURNAL = JournalPart(kinds={"what_is_trained": ENTRY}, sections=show_what_is_trained)
