"""`Any` does not spread, under its own name or under that of an alias."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .parsed import files, parse, text

PER_100_LINES = 5.2  # 5.06 in November 2026, of which aliases are half


def named(node: ast.AST) -> str | None:
    """Returns the last part of a name, also of one inside a quoted annotation."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return None


def unquoted(tree: ast.AST) -> Iterable[ast.AST]:
    """Yields the nodes of a tree; a text that is a type expression is read as one."""
    for node in ast.walk(tree):
        yield node
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "[" in node.value:
            try:
                yield from ast.walk(ast.parse(node.value, mode="eval"))
            except SyntaxError:
                continue


def aliases(trees: Iterable[ast.AST]) -> set[str]:
    """Returns the names of type aliases that stand for a type with `Any` in it, directly or through another alias."""
    values: dict[str, ast.expr] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and named(node.annotation) == "TypeAlias" and node.value is not None:
                assert isinstance(node.target, ast.Name)
                values[node.target.id] = node.value
    found = {"Any"}
    while more := {name for name, value in values.items() if {named(n) for n in unquoted(value)} & found} - found:
        found |= more
    return found - {"Any"}


def num_uses(tree: ast.AST, names: set[str]) -> int:
    """Counts uses of names in a file; imports do not count."""
    return sum(named(node) in names for node in unquoted(tree))


def test_any_does_not_spread() -> None:
    texts = [text(path) for path in files().values()]
    trees = [parse(source) for source in texts]
    names = {"Any", *aliases(trees)}
    uses = sum(num_uses(tree, names) for tree in trees)
    num_lines = sum(source.count("\n") for source in texts)
    assert uses > 500, "nothing was counted"
    assert 100 * uses / num_lines <= PER_100_LINES


def test_uses_are_counted_through_aliases_and_imports_are_not() -> None:
    source = (
        "import typing\nfrom typing import Any\n"
        "Batch: TypeAlias = dict[str, Any]\nBatches: TypeAlias = 'list[Batch]'\nNumber: TypeAlias = int\n"
        "def f(x: Any, y: Batches, z: Number) -> typing.Any: ...\n"
    )
    tree = ast.parse(source)
    names = aliases([tree])
    assert names == {"Batch", "Batches"}
    # Batch and Batches where they are defined, the Any and the Batch in their values, x, y and what f returns.
    assert num_uses(tree, {"Any", *names}) == 7
