"""Table: cells of rows before they are encoded, by column, for the checks of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trainwright.preflight.rows import quoted

MOST_LISTED = 5  # rows that a finding names


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows with texts, numbers and labels as they were written.

    Attributes:
        part: part of the data, for messages.
        columns: cells by column, in the order of the rows; read on demand.
        find_name: returns the name of the row at a position, from 0.
        label: column of labels that are classes; None if there is none.
        numbers: columns with numbers.
        used: columns used in training.
        twice: duplicate columns in the first line of a file, with the name of the file.
        renamed: labels, as written, with their other names; None for labels that are left out.
        entries: entries of a configuration file, by column.
    """

    part: str
    columns: Mapping[str, Callable[[], Sequence[object]]]
    find_name: Callable[[int], str]
    label: str | None = None
    numbers: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    twice: tuple[tuple[str, str], ...] = ()
    renamed: Mapping[str, str | None] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)

    def listed(self, places: Sequence[int], *, cells: Sequence[object] | None = None) -> str:
        """Names rows, with their cells: `reviews.csv:3 'text', reviews.csv:17 ' ', ... (12)`."""
        shown = [
            self.find_name(place) if cells is None else f"{self.find_name(place)} {quoted(cells[place])}"
            for place in places[:MOST_LISTED]
        ]
        return ", ".join(shown) + (f", ... ({len(places)})" if len(places) > MOST_LISTED else "")

    def names(self, places: Sequence[int]) -> tuple[str, ...]:
        """Returns the names of the first rows, for programs."""
        return tuple(self.find_name(place) for place in places[:MOST_LISTED])

    def entry(self, column: str | None) -> str:
        """Returns the entry of the configuration file that names a column; empty if there is none."""
        return "" if column is None else self.entries.get(column, "")
