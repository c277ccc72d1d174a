"""A file that a person or a stranger names is read by `support/door.py`: it waits for no pipe and limits the size."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..sources.parsed import parse_file

pytestmark = pytest.mark.lint

SRC = Path(__file__).parents[2] / "src" / "trainwright"

# Function -> why it may read a whole file by itself.
EXCEPTIONS = {
    "report.page": "assets of this package",
    "cli.mcp_server.serve": "likewise",
    "cli.recipe.recipe_reader.template": "likewise",
    "cli.recipe.known_models": "likewise",
    "cli.tasks.chat": "likewise; the user's templates go through the door",
    "support.host": "files of the system",
    "preflight.remembered": "likewise",
    "trackers.platforms": "a file that the platform mounts",
    "preflight.against": "the log of a process that this one started, in a directory of its own",
    "preflight.prove": "likewise",
    "capabilities.lease.lease": "a draft that this process wrote",
}


def reads(node: ast.AST, place: str) -> Iterator[str]:
    """Yields the places at which a file is read as a whole by its path."""
    for child in ast.iter_child_nodes(node):
        inner = f"{place}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else place
        called = child.func if isinstance(child, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ("read_text", "read_bytes"):
            yield inner
        yield from reads(child, inner)


def found() -> list[str]:
    places = []
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        places += reads(parse_file(path), module)
    return places


def is_exception(place: str, entry: str) -> bool:
    return place == entry or place.startswith(f"{entry}.")


def test_files_are_read_by_the_door_alone() -> None:
    assert [place for place in found() if not any(is_exception(place, entry) for entry in EXCEPTIONS)] == []


def test_every_exception_is_used() -> None:
    places = found()
    assert [entry for entry in EXCEPTIONS if not any(is_exception(place, entry) for place in places)] == []
