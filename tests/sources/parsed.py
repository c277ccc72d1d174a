"""Sources of the package as texts and syntax trees, each read and parsed once for all rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import trainwright

SOURCE = Path(trainwright.__file__).parent


@cache
def files() -> dict[str, Path]:
    """Returns the files of the package by their names, as "run/build.py"."""
    return {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def text(path: Path) -> str:
    """Returns a source."""
    return path.read_text(encoding="utf-8")


@cache
def parse(source: str) -> ast.Module:
    """Returns the syntax tree of a source; nobody may change it."""
    return ast.parse(source)


def parse_file(path: Path) -> ast.Module:
    """Returns the syntax tree of a file; nobody may change it."""
    return parse(text(path))


def words_in(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each name and string of a source; docstrings are left alone."""
    tree = parse(source)
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if id(node) not in prose:
            yield from ((node.lineno, word) for word in _spelled_out(node))  # type: ignore[attr-defined]


def _spelled_out(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "arg", "name", "asname", "module"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from node.names
