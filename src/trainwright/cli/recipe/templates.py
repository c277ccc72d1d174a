"""The configuration files that `trainwright init` writes: one for each task; on request, every setting."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from trainwright.cli.recipe.schema import TASKS
from trainwright.cli.recipe.training_section import arguments_class
from trainwright.cli.recipe.yaml_tree import parse, scalar
from trainwright.config.help import grouped
from trainwright.config.serialization import plain

WIDTH = 118


def template(task: str, *, with_everything: bool = False) -> str:
    """Returns a file for a task, ready to train; `with_everything` adds all settings as comments."""
    text = files("trainwright.cli.recipe").joinpath("templates").joinpath(f"{task}.yaml").read_text(encoding="utf-8")
    if not with_everything:
        return text
    there = set(parse(text, task).value["training"])
    return text + "\n".join(_rest(task, there)) + "\n"


def _rest(task: str, there: set[str]) -> Iterator[str]:
    """Yields the settings that the file lacks, as comments with their defaults."""
    for title, fields in grouped(arguments_class(generates=TASKS[task].generates)).items():
        missing = [one for one in fields if one.name not in there]
        if missing:
            yield f"\n  # -- {title}"
        for one in missing:
            help = textwrap.wrap(one.metadata.get("help", ""), WIDTH - 8)
            yield "\n".join([f"  # {one.name}: {_shown(one)}", *(f"  #     {line}" for line in help)])


def _shown(one: dataclasses.Field[Any]) -> str:
    default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
    value = plain(default)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and scalar(value or "null") != value else str(value)
