"""Hooks of mkdocs: the tables of arguments are derived from the declarations of the fields."""

from __future__ import annotations

import inspect
from typing import Any

PLACE = "<!-- arguments -->"
HEAD = "| field | type | default | | on a resume |\n|---|---|---|---|---|"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(PLACE, arguments()) if PLACE in markdown else markdown


def arguments() -> str:
    """A table for each title of groups: type, default, help with limits and older names, what a change means."""
    from trainwright.config.fields import WITH_GENERATION

    rows: dict[str, list[str]] = {}
    for group in WITH_GENERATION:
        types = inspect.get_annotations(group)
        for name, one in group.settings.items():
            rows.setdefault(group.group, []).append(_row(name, types[name], one))
    return "\n\n".join("\n".join([f"### {title}", "", HEAD, *found]) for title, found in rows.items())


def _row(name: str, kind: str, one: Any) -> str:
    default = one.default if one.factory is None else one.factory()
    kind = kind.removesuffix(" | None").replace(" | Any", "")
    cells = [f"`{name}`", f"`{kind}`", f"`{default!r}`", _help(one), one.on_resume or "not compared"]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _help(one: Any) -> str:
    parts = [one.help]
    if one.limits is not None:
        parts.append(f"A{' whole' if one.limits.whole else ''} number, {one.limits}.")
    if one.choices:
        parts.append(f"One of {', '.join(f'`{word}`' for word in one.choices)}.")
    if "duration" in one.syntax or "dict" in one.syntax:
        parts.append({"duration": "A length of time such as `8h`.", "dict": "Also as a JSON string."}[one.syntax[0]])
    if one.formerly:
        parts.append(f"Formerly {', '.join(f'`{old}`' for old in one.formerly)}.")
    if not one.searchable:
        parts.append("Not in a hyperparameter search.")
    if one.since is not None:
        parts.append(f"Since {one.since}.")
    return " ".join(parts)
