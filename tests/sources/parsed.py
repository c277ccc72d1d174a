"""Sources of the package as texts and syntax trees, each read and parsed once for all rules."""

from __future__ import annotations

import ast
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
