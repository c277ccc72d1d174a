"""Reads who imports whom from the sources: inside functions and under TYPE_CHECKING too."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .parsed import parse, text

PACKAGE = "trainwright"


@dataclass(frozen=True)
class Import:
    """`importer` asks for `module`, both as dotted names.

    Attributes:
        guarded: it is inside a function or a `try`.
        for_types: it is under TYPE_CHECKING, and never carried out.
    """

    importer: str
    module: str
    line: int
    guarded: bool
    for_types: bool = False

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


def modules(root: Path) -> dict[str, Path]:
    """Dotted names of all modules of the package at `root`, a package by its own name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(root).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def read(root: Path) -> list[Import]:
    sources = modules(root)
    return [found for name, path in sources.items() for found in imports_of(name, path, sources)]


def imports_of(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[Import]:
    tree = parse(text(path))
    guards = {id(inner) for outer in ast.walk(tree) if _guards(outer) for inner in ast.walk(outer)}
    typed = {id(inner) for outer in ast.walk(tree) if _is_for_types(outer) for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        for module in _asked_for(node, name, is_package=path.name == "__init__.py", known=known):
            yield Import(name, module, node.lineno, id(node) in guards, id(node) in typed)  # type: ignore[attr-defined]


def _guards(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _asked_for(node: ast.AST, name: str, *, is_package: bool, known: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _base(node, name, is_package=is_package)
        for alias in node.names:  # `from package import module` asks for the module
            inner = f"{base}.{alias.name}"
            yield inner if inner in known or base == PACKAGE else base
    elif isinstance(node, ast.Call) and _callee(node) in ("import_module", "__import__"):
        named = node.args[0] if node.args else None
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            yield named.value


def _base(node: ast.ImportFrom, name: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = name.split(".")[: None if is_package and node.level == 1 else (1 if is_package else 0) - node.level]
    return ".".join([*parents, node.module] if node.module else parents)


def _callee(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def circles(imports: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that reach each other, by Tarjan's algorithm."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.package == PACKAGE and one.importer != one.module:
            graph.setdefault(one.importer, set()).add(one.module)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
