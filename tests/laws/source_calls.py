"""Finds calls in the sources, for laws about them; the exceptions of a law are rows with a reason."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ..sources.parsed import parse_file

SRC = Path(__file__).parents[2] / "src" / "trainwright"

Place = tuple[str, ast.AST]  # dotted name of module, classes and functions -> a node in it


def nodes(tree: ast.AST, place: str) -> Iterator[Place]:
    """Yields all nodes below a tree with their places."""
    for child in ast.iter_child_nodes(tree):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{place}.{child.name}"
        yield inner, child
        yield from nodes(child, inner)


@functools.cache
def source_nodes() -> list[Place]:
    """Returns all nodes of the package."""
    found: list[Place] = []
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        found += nodes(parse_file(path), module)
    return found


@functools.cache
def places_where(is_found: Callable[[ast.AST], str | None]) -> list[str]:
    """Returns "place: what" for each node of the package for which a function returns what it found."""
    found = ((place, is_found(node)) for place, node in source_nodes())
    return sorted({f"{place}: {what}" for place, what in found if what is not None})


def found_in(text: str, is_found: Callable[[ast.AST], str | None]) -> list[str]:
    """Returns what a function finds in a piece of code."""
    return [what for _, node in nodes(ast.parse(text), "") if (what := is_found(node)) is not None]


def is_row(found: str, row: str) -> bool:
    """Returns whether a row names a found place: all of it, or a part of its dotted name and what is within."""
    place = found.partition(": ")[0]
    return row == found or place == row or place.startswith(f"{row}.")


def without_row(found: Iterable[str], rows: Mapping[str, str]) -> list[str]:
    """Returns the found places that no row excepts."""
    return [one for one in found if not any(is_row(one, row) for row in rows)]


def unused(found: Iterable[str], rows: Mapping[str, str]) -> list[str]:
    """Returns the rows that name nothing any more."""
    found = list(found)
    return [row for row in rows if not any(is_row(one, row) for one in found)]
