"""One statement, one line: no packed assignments, no chains of conditional expressions, no layout kept from ruff."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import parsed

ROOT = Path(__file__).resolve().parents[2]
PLACES = [parsed.SOURCE, *(ROOT / name for name in ("tests", "benchmarks", "docs", "examples", "tools"))]


def reads(value: ast.expr, target: ast.expr) -> bool:
    """Returns whether a value reads the variable, attribute or item, or one of the variables of a nested target."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(reads(value, one) for one in target.elts)
    text = ast.unparse(target)
    return any(isinstance(node, type(target)) and ast.unparse(node) == text for node in ast.walk(value))


def is_packed(node: ast.AST) -> bool:
    """Returns whether an assignment could be several: `a, b = x, y`, but neither `a, b = pair` nor `a, b = b, a`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, (ast.Tuple, ast.List)):
        return False
    for target in node.targets:
        if not isinstance(target, (ast.Tuple, ast.List)) or len(target.elts) != len(node.value.elts):
            return False
        if any(isinstance(one, ast.Starred) for one in [*target.elts, *node.value.elts]):
            return False
        for place, value in enumerate(node.value.elts):
            if any(reads(value, before) for before in target.elts[:place]):
                return False
    return True


def is_chain(node: ast.AST) -> bool:
    """Returns whether a conditional expression is the result of another one."""
    return isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse))


def findings(text: str) -> Iterator[str]:
    """Yields the places of a source that have several statements in one line, or their own layout."""
    for node in ast.walk(parsed.parse(text)):
        if is_packed(node):
            yield f"{node.lineno}: packed assignment"
        elif is_chain(node):
            yield f"{node.lineno}: chain of conditional expressions"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.string.lstrip("# ").startswith(("fmt: skip", "fmt: off")):
            yield f"{token.start[0]}: layout kept from ruff"


def test_a_statement_has_a_line_of_its_own() -> None:
    files = [path for place in PLACES for path in sorted(place.rglob("*.py"))]
    assert [f"{path}:{one}" for path in files for one in findings(parsed.text(path))] == []


@pytest.mark.parametrize(
    "text",
    [
        "a, b = 1, 2",
        "self.a, self.b = a, b",
        "(a, b), c = pair, 3",
        "a, b = b, 0",
        "a, b = (\n    1,\n    2,\n)",
        "[a, b] = [1, 2]",
        "a = 1 if x else 2 if y else 3",
        "a = (1 if x else 2) if y else 3",
        "call(1 if x else (2 if y else 3))",
        "names = (1, 2)  # fmt: skip",
        "# fmt: off\nnames = (1, 2)\n# fmt: on",
    ],
)
def test_such_statements_are_found(text: str) -> None:
    assert len(list(findings(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "a, b = pair",
        "a, b = call()",
        "a, b = b, a",
        "self.a, before = new, self.a",
        "items[i], items[j] = items[j], items[i]",
        "a, *b = 1, 2",
        "a, b = *one, 2",
        "pair = a, b",
        "for a, b in ((1, 2), (3, 4)): pass",
        "a = b = 1",
        "a = 1 if (2 if x else y) else 3",
        "a = '# fmt: skip'",
    ],
)
def test_other_statements_are_not_found(text: str) -> None:
    assert list(findings(text)) == []
