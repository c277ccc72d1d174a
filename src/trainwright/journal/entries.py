"""The form of journal entries: a line of a file is an entry if each field that readers know is of its type.

Readers take the fields as they are, so a line with a wrong value counts as one that a killed process did not finish.
"""

from __future__ import annotations

import functools
from typing import Any

from trainwright.capability_table import TABLE, load
from trainwright.journal.forms import (
    Entry,
    EntryForm,
    Form,
    JournalPart,
    mapping,
    mapping_to,
    optional,
    parse_count,
    parse_positive,
    parse_switch,
    parse_text,
    parse_time,
)
from trainwright.support.door import MALFORMED, parse_json, parse_step, without_halves

MAX_LINE = 1 << 24  # bytes of an entry; a longer one is left out


def parse_entry(line: bytes) -> Entry | None:
    """Returns the entry in a line of a journal; None if there is none, or a field has a wrong value."""
    try:
        entry = without_halves(parse_json(line))
        form = list_kinds().get(entry["kind"], EntryForm())
        fields = _COMMON | dict(form.fields)
        found = {name: value for name, value in entry.items() if value is not None or name not in fields}
        mapping(**fields)(found)
        for name in ("kind", "run", *form.required):
            found[name]
    except MALFORMED:
        return None
    return found


@functools.cache
def list_parts() -> tuple[JournalPart, ...]:
    """Returns what the capabilities write into the journal, in the order of the table."""
    return tuple(load(row.journal) for row in TABLE if row.journal)


@functools.cache
def list_kinds() -> dict[str, EntryForm]:
    """Returns the forms of entries by kind: those of the core, and those of capabilities."""
    run = dict(_RUN)
    kinds = dict(_KINDS)
    for part in list_parts():
        run |= part.facts
        kinds |= part.kinds
    return kinds | {
        "start": EntryForm(fields=run, required=("step",)),
        "resume": EntryForm(fields=run, required=("step",)),
    }


def _data(value: Any) -> None:
    """Checks the facts about a dataset, or about several by name."""
    mapping(samples=optional(parse_count))(value)
    for inner in value.values():
        if isinstance(inner, dict):
            _data(inner)


# Of the entry with which a run begins, or goes on.
_RUN: dict[str, Form] = {
    "checkpoint": parse_text,
    "plan": mapping(total_batch_size=parse_positive),
    "arguments": mapping(metric_for_best_model=optional(parse_text), greater_is_better=optional(parse_switch)),
    "changed": mapping(),
    "environment": mapping(packages=mapping(), device=parse_text),
    "data": mapping_to(_data),
    "model": mapping(**{"class": parse_text}, parameters=parse_count, trained_parameters=parse_count),
    "process": mapping(),
    "recipe": mapping_to(parse_text),
}
# Fields that readers know in entries of all kinds.
_COMMON: dict[str, Form] = {
    "kind": parse_text,
    "run": parse_text,
    "time": parse_time,
    "step": parse_step,
    "peak_memory_bytes": parse_count,
    "peak_gpu_bytes": parse_count,
}
_LOG = EntryForm(fields={"values": mapping()}, required=("step", "values"), is_of_a_step=True)
_KINDS: dict[str, EntryForm] = {
    "log": _LOG,
    "evaluation": _LOG,
    "save": EntryForm(fields={"best": parse_text}, required=("step",), is_of_a_step=True),
    "delivered": EntryForm(is_of_a_step=True),
    "end": EntryForm(fields={"best": parse_text}),
    "failed": EntryForm(fields={"error": parse_text, "traceback": parse_text}, required=("step",)),
    "incident": EntryForm(fields={"text": parse_text}, required=("step", "text"), is_of_a_step=True),
    "warning": EntryForm(
        fields={"text": parse_text, "check": parse_text}, required=("step", "text"), is_of_a_step=True
    ),
    "time": EntryForm(fields={"time_by_phase": mapping_to(parse_count)}, required=("time_by_phase",)),
}
