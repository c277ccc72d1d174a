"""JSON that comes from outside is read by `support/door.py`, which limits its bytes, depth and digits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..sources.parsed import parse_file

pytestmark = pytest.mark.lint

SRC = Path(__file__).parents[2] / "src" / "trainwright"

# Function -> why it may call `json` itself.
EXCEPTIONS = {
    "support.door.parse_json": "it is the door",
    "support.door.without_halves": "a value that went through the door, once more",
    "config.parser.METAVARS": "words that the user types: argparse names the function in its errors",
    "config.parser._converter": "likewise",
    "checkpoint.training_state": "the arguments of this process, as text and back",
    "run.resume": "likewise",
}


def calls(node: ast.AST, place: str) -> Iterator[str]:
    """Yields the places at which `json.load` or `json.loads` is used."""
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{place}.{child.name}"
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            inner = f"{place}.{child.target.id}"
        is_json = isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "json"
        if is_json and child.attr in ("load", "loads", "JSONDecoder"):
            yield place
        if isinstance(child, ast.ImportFrom) and child.module == "json":
            yield place
        yield from calls(child, inner)


def found() -> list[str]:
    places = []
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        places += calls(parse_file(path), module)
    return places


def is_exception(place: str, entry: str) -> bool:
    return place == entry or place.startswith(f"{entry}.")


def test_json_is_read_by_the_door_alone() -> None:
    assert [place for place in found() if not any(is_exception(place, entry) for entry in EXCEPTIONS)] == []


def test_every_exception_is_used() -> None:
    places = found()
    assert [entry for entry in EXCEPTIONS if not any(is_exception(place, entry) for place in places)] == []
