"""Hooks of mkdocs: tables of arguments from the declarations of the fields, the architecture from CONTRIBUTING.md."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

HEAD = "| argument: type = default | meaning, and what a change does to a resume |\n|---|---|"
DOCS = Path(__file__).parents[1] / "docs"
REPOSITORY = "https://github.com/trainwright/trainwright/blob/main"
SECTIONS = ("Architecture", "One batch, walking through", "One checkpoint, walking through", "Resuming a stream")


def on_page_markdown(markdown: str, **_: Any) -> str:
    for place, made in (
        ("<!-- arguments -->", arguments),
        ("<!-- architecture -->", architecture),
        ("<!-- changelog -->", changelog),
    ):
        markdown = markdown.replace(place, made()) if place in markdown else markdown
    return markdown


def architecture() -> str:
    """The sections of CONTRIBUTING.md that describe the code."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL))
    return "\n".join(f"## {title}\n{parts[title]}" for title in SECTIONS)


def changelog() -> str:
    """CHANGELOG.md without its title, with links that lead to the pages of the site."""
    text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")[2]
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\((?!https?:|#)([^)]*)\)", _link, text)


def _link(found: re.Match[str]) -> str:
    """A link of the changelog: to a page, or for a file that is not on the site, to the repository."""
    place = found[1]
    return (
        f"]({place})" if ".md" in place and (DOCS / place.partition("#")[0]).is_file() else f"]({REPOSITORY}/{place})"
    )


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
    kind = kind.removesuffix(" | None").replace(" | Any", "").replace("enums.", "").replace(" | ", " or ")
    resumed = "" if one.on_resume is None else f" On a resume: {one.on_resume.replace('on a resume: ', 'since ')}."
    cells = [f"`{name}`: `{kind}` = `{default!r}`", _help(one) + resumed]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _help(one: Any) -> str:
    parts = [one.help]
    if one.limits is not None:
        limits = f", {one.limits}" if math.isfinite(one.limits.low) else ""
        parts.append(f"A{' whole' if one.limits.whole else ''} number{limits}.")
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
