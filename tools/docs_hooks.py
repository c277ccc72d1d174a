"""Hooks of mkdocs: what the code declares (arguments, checks, entries of files, tasks), members, the changelog."""

from __future__ import annotations

import dataclasses
import html
import inspect
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
REPOSITORY = "https://github.com/trainwright/trainwright/blob/main"
MOST_LETTERS = 130  # sum of the longest cells of each column: above, a table is too wide for a phone
SHORT_NAME = 16  # letters of a name that is not broken


def on_page_markdown(markdown: str, **_: Any) -> str:
    made = {
        "arguments": arguments,
        "changelog": changelog,
        "checks": checks,
        "entries": entries,
        "tasks": tasks,
        "trainer": trainer,
    }
    for name, make in made.items():
        place = f"<!-- {name} -->"
        if place in markdown:
            markdown = markdown.replace(place, make())
    return markdown


def on_page_content(content: str, **_: Any) -> str:
    return re.sub(r"<table>.*?</table>", _with_titles, content, flags=re.DOTALL)


def _with_titles(found: re.Match[str]) -> str:
    """A table; if it is too wide for a phone, each cell has the title of its column, which pages.css shows there.

    The first column has none: its cells are the titles of the cards that the rows become.
    """
    table = found[0]
    titles = [_text(one) for one in re.findall(r"<th\b[^>]*>(.*?)</th>", table, flags=re.DOTALL)]
    if len(titles) < 3 or not any(titles):
        return table
    rows = re.findall(r"<tr\b[^>]*>.*?</tr>", table, flags=re.DOTALL)
    cells = [re.findall(r"<td\b[^>]*>(.*?)</td>", row, flags=re.DOTALL) for row in rows]
    longest = [max((len(_text(row[i])) for row in cells if len(row) > i), default=0) for i in range(len(titles))]
    if sum(longest) <= MOST_LETTERS and "doc-section-item" not in table:  # those of the reference have long names
        return table

    def titled(row: re.Match[str]) -> str:
        names = iter(titles)
        return re.sub(r"<td\b", lambda _: f'<td data-title="{html.escape(next(names, ""))}"', row[0])

    table = re.sub(r"<code>.*?</code>", _with_breaks, table, flags=re.DOTALL)
    return re.sub(r"<tr\b[^>]*>.*?</tr>", titled, table, flags=re.DOTALL)


def _with_breaks(found: re.Match[str]) -> str:
    """Code in which a long name may be broken after a sign, not within a word."""
    if len(_text(found[0])) <= SHORT_NAME:
        return found[0]
    parts = re.split(r"(<[^>]*>)", found[0])
    return "".join(part if part.startswith("<") else re.sub(r"([_/.\[(=])(?=\w)", r"\1<wbr>", part) for part in parts)


def _text(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()


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
    """A heading for each argument, under the title of its group: type, default, effect of a change, help."""
    from trainwright.config.fields import WITH_GENERATION

    parts: dict[str, list[str]] = {}
    for group in WITH_GENERATION:
        types = inspect.get_annotations(group)
        for name, one in group.settings.items():
            parts.setdefault(group.group, []).append(_argument(name, types[name], one))
    return "\n\n".join("\n\n".join([f"## {title}", *found]) for title, found in parts.items())


def _argument(name: str, kind: str, one: Any) -> str:
    default = one.default if one.factory is None else one.factory()
    kind = kind.removesuffix(" | None").replace(" | Any", "").replace("enums.", "").replace(" | ", " or ")
    badges = [("type", kind), ("default", f"default {default!r}")]
    if one.on_resume is not None:
        badges.append(("effect", f"on a resume: {one.on_resume.replace('on a resume: ', 'since ')}"))
    if not one.searchable:
        badges.append(("fixed", "not in a search"))
    if one.since is not None:
        badges.append(("since", f"since {one.since}"))
    line = " ".join(f'<span class="badge badge-{sort}">{html.escape(text)}</span>' for sort, text in badges)
    return f'### `{name}` {{ #{name} .argument }}\n\n<p class="badges">{line}</p>\n\n{_help(one)}'


def tasks() -> str:
    """A section for each task of the command line: its columns, and the file that `trainwright init` writes."""
    from trainwright.cli.recipe.recipe_reader import template
    from trainwright.cli.recipe.schema import TASKS

    parts = []
    for name, spec in TASKS.items():
        takes = f" It also takes {_listed(spec.takes)}." if spec.takes else ""
        needs = f"Columns: {_listed(spec.needs)}.{takes}" if spec.needs else f"Columns: any of {_listed(spec.takes)}."
        about = f"{spec.title[:1].upper()}{spec.title[1:]}. {needs} The model is loaded by `{spec.model_class}`."
        if spec.adapter is not None:
            about += " It trains LoRA adapters too."
        shown = template(name).rstrip().partition("\n")[2]  # without the line for editors
        file = f"```yaml\n{shown}\n```"
        parts.append(
            f"### {name}\n\n{about}\n\n```\ntrainwright init {name}\ntrainwright train config.yaml\n```\n\n{file}"
        )
    return "\n\n".join(parts)


def checks() -> str:
    """A row for each check of the check-up."""
    import trainwright.preflight.check_up  # noqa: F401 -- registers every check
    from trainwright.preflight.check_registry import CHECKS

    moments = {"full": "`check()`", "file": "`trainwright check`"}
    rows = [f"| `{one.name}` | {one.about} | {moments.get(one.when, 'every run')} |" for one in CHECKS.values()]
    return "\n".join(["| check | looks at | when |", "|---|---|---|", *rows])


def entries() -> str:
    """A table of the entries of each part of a configuration file."""
    from trainwright.cli.recipe import early_stopping, schema

    parts = {"model": schema.ModelPart, "model.learn_tokenizer": schema.LearnPart, "lora": schema.LoraPart}
    parts |= {"preference": schema.PreferencePart}
    parts |= {"data": schema.DataPart, "data.image": schema.ImagePart, "launch": schema.LaunchPart}
    found = []
    head = ["| entry | default | meaning |", "|---|---|---|"]
    for name, kind in parts.items():
        rows = [_entry(one) for one in dataclasses.fields(kind)]
        found.append("\n".join([f"## `{name}`", "", str(kind.__doc__), "", *head, *rows]))
    more = [f"| `{name}` | | {meaning} |" for name, meaning in early_stopping.ENTRIES.items()]
    found.append("\n".join(["## `training`", "", "Besides the arguments:", "", *head, *more]))
    found.append(f"## `metrics`\n\n{schema.METRICS_HELP}")
    return "\n\n".join(found)


def _entry(one: dataclasses.Field[Any]) -> str:
    choices = one.metadata.get("choices")
    meaning = one.metadata["help"] + (f" One of {_listed(choices)}." if choices else "")
    is_plain = isinstance(one.default, str | int | float | bool)
    return f"| `{one.name}` | {f'`{one.default}`' if is_plain else ''} | {meaning} |".replace(" |  | ", " | | ")


def _listed(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def members(name: str, first: Sequence[str]) -> str:
    """The public methods of a class of `trainwright`, as options of mkdocstrings: those of `first`, then by source."""
    import trainwright

    kind = getattr(trainwright, name)
    found = [one for one in vars(kind) if not one.startswith("_") and callable(getattr(kind, one))]
    ordered = [*first, *(one for one in found if one not in first)]
    listed = "\n".join(f"        - {one}" for one in ordered)
    return f"::: {kind.__module__}.{name}\n    options:\n      members:\n{listed}"


def trainer() -> str:
    return members("Trainer", ("train", "evaluate", "predict", "save_model"))


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
    return " ".join(parts)
