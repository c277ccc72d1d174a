"""What mkdocs asks while it builds the site: the table of arguments is made from the fields themselves."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

PLACE = "<!-- arguments -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(PLACE, arguments()) if PLACE in markdown else markdown


def arguments() -> str:
    """A table for each group of fields, with defaults and help."""
    from trainwright.config.fields import GROUPS

    parts = []
    for group in GROUPS:
        rows = [f"| `{field.name}` | {_default(field)} | {_help(field)} |" for field in fields(group)]
        title = group.group  # type: ignore[attr-defined]
        parts.append("\n".join([f"### {title}", "", "| field | default | |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _default(field: Any) -> str:
    value = field.default if not callable(field.default_factory) else field.default_factory()
    return f"`{getattr(value, 'value', value)!r}`"


def _help(field: Any) -> str:
    return str(field.metadata.get("help", "")).replace("|", "\\|")
