"""HTML of tables, for notebooks and reports. Every value is escaped; the content of rows is up to the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainwright._types import printable, without_tokens

Row = Sequence[object]

CELL = "text-align: left; vertical-align: top; padding: .15em .6em"  # also in a front end that centers cells


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of a page: rows of a table, or HTML. Without both, it is left out.

    Attributes:
        title: its heading.
        rows: the rows of its table.
        html: its content, in which every value is escaped.
    """

    title: str
    rows: Sequence[Row] = ()
    html: str = ""


def cell_text(value: object) -> str:
    """Returns a value as text of HTML, on one line, with *** in place of likely keys."""
    from html import escape  # with its table of entities, which imports of the trainer need not load

    return escape(without_tokens(printable(str(value))))


def lines_text(text: str) -> str:
    """Returns text of several lines as text of HTML, as `cell_text` does for one line."""
    from html import escape

    return escape(without_tokens(printable(text, lines=True)))


def html_table(rows: Iterable[Row], *, header: Row = ()) -> str:
    """Returns a table; empty text without rows."""
    body = [_row(row, "td") for row in rows]
    head = f"<thead>{_row(header, 'th')}</thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(body)}</tbody></table>" if body else ""


def html_pairs(values: Mapping[str, object]) -> str:
    """Returns a table of names and values; floats with six digits."""
    return html_table((name, f"{value:.6g}" if isinstance(value, float) else value) for name, value in values.items())


def html_section(title: str, *parts: str, is_folded: bool = False) -> str:
    """Returns parts of HTML under a title; with `is_folded` they show when the title is clicked."""
    inner = "".join(parts)
    if is_folded:
        return f"<details><summary>{cell_text(title)}</summary>{inner}</details>"
    return f"<div><strong>{cell_text(title)}</strong>{inner}</div>"


def html_marked(parts: Iterable[tuple[str, bool]]) -> str:
    """Returns a paragraph of text in parts, of which some are marked."""
    words = [f"<mark>{cell_text(text)}</mark>" if is_marked else cell_text(text) for text, is_marked in parts]
    return f"<p>{' '.join(words)}</p>"


def _row(cells: Row, tag: str) -> str:
    return "<tr>" + "".join(f'<{tag} style="{CELL}">{cell_text(cell)}</{tag}>' for cell in cells) + "</tr>"
