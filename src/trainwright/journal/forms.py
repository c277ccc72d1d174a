"""Forms of journal entries: what a field must be so that readers may take it as it is.

A form is a function that raises ValueError, TypeError or KeyError for a value of another form. A capability describes
its own entries by a `JournalPart`, which its row of the table names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from trainwright.support.door import parse_number
from trainwright.support.html_table import PageSection

LAST_TIME = 1 << 37  # seconds since 1970 that a calendar has
MAX_COUNT = 1 << 63

Entry = dict[str, Any]  # Any: whatever JSON holds
Form: TypeAlias = Callable[[Any], object]


def parse_text(value: object) -> None:
    """Checks a text."""
    if not isinstance(value, str):
        raise TypeError


def parse_switch(value: object) -> None:
    """Checks true or false."""
    if not isinstance(value, bool):
        raise TypeError


def parse_count(value: object) -> None:
    """Checks a number from 0 on."""
    parse_number(value, least=0, most=MAX_COUNT)


def parse_positive(value: object) -> None:
    """Checks a number from 1 on."""
    parse_number(value, least=1, most=MAX_COUNT)


def parse_time(value: object) -> None:
    """Checks a time in seconds since 1970."""
    parse_number(value, least=0, most=LAST_TIME)


def optional(one: Form) -> Form:
    """Returns the form of a value that may be null."""

    def parse(value: Any) -> None:
        if value is not None:
            one(value)

    return parse


def mapping(**fields: Form) -> Form:
    """Returns the form of an object: that of its fields which are known, if they are there."""

    def parse(value: Any) -> None:
        if not isinstance(value, dict):
            raise TypeError
        for name, form in fields.items():
            if name in value:
                form(value[name])

    return parse


def mapping_to(one: Form) -> Form:
    """Returns the form of an object whose values are of one form."""

    def parse(value: Any) -> None:
        for inner in value.values():
            one(inner)

    return parse


def sequence(one: Form, *required: str) -> Form:
    """Returns the form of a list whose items are of one form, objects with the `required` fields."""

    def parse(value: Any) -> None:
        if not isinstance(value, list):
            raise TypeError
        for inner in value:
            one(inner)
            for name in required:
                inner[name]

    return parse


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryForm:
    """The form of entries of one kind.

    Attributes:
        fields: forms of the fields that readers know.
        required: fields that each entry has.
        is_of_a_step: they belong to a step, so that a resume from an earlier one supersedes them.
        is_marked: the curves of a report show them at their step.
    """

    fields: Mapping[str, Form] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    is_of_a_step: bool = False
    is_marked: bool = False


class Entries(Protocol):
    """The entries of a run; a `Record`."""

    @property
    def entries(self) -> list[Entry]: ...

    def of(self, kind: str) -> list[Entry]:
        """Returns the entries of a kind."""


def last_start(record: Entries) -> Entry:
    """Returns the entry with which the run began or was resumed last."""
    return next((entry for entry in reversed(record.entries) if entry["kind"] in ("start", "resume")), {})


def find_no_origins(record: Entries) -> list[Entry]:
    """Returns no origins of a run."""
    return []


def show_nothing(record: Entries) -> Sequence[PageSection]:
    """Returns no section of a report."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPart:
    """What a capability writes into the journal, and what a report shows of it.

    Attributes:
        kinds: forms of its own entries, by their kind.
        facts: forms of what it adds to the entry with which a run begins, or goes on, by the field.
        sections: returns the sections of a run's report.
        origins: returns the checkpoints of other runs that a run comes from, the oldest first: each has the
            `checkpoint` (a path), its `step`, and the id of its `run`.
    """

    kinds: Mapping[str, EntryForm] = field(default_factory=dict)
    facts: Mapping[str, Form] = field(default_factory=dict)
    sections: Callable[[Entries], Sequence[PageSection]] = show_nothing
    origins: Callable[[Entries], list[Entry]] = find_no_origins
