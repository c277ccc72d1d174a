"""Sizes of the sources that may fall and not rise: `python -m tests.contract.ratchet` writes the lower ones down."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "trainwright"
LIMITS = Path(__file__).with_name("ratchet.json")


def measured(sources: Path = SOURCES) -> dict[str, float]:
    """Returns the number of lines, and of uses of `Any` in a hundred of them; imports of `Any` do not count."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(sources.rglob("*.py"))]
    lines = sum(text.count("\n") for text in texts)
    return {"lines": lines, "any_per_100_lines": round(100 * sum(map(num_any, texts)) / lines, 2)}


def num_any(text: str) -> int:
    return _count(ast.walk(ast.parse(text)))


def _count(nodes: Iterable[ast.AST]) -> int:
    found = 0
    for node in nodes:
        named = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        found += named == "Any"
    return found


def limits() -> dict[str, float]:
    return dict(json.loads(LIMITS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    now, before = measured(), limits()
    lower = {name: min(now[name], before[name]) for name in before}
    LIMITS.write_text(json.dumps(lower, indent=4) + "\n", encoding="utf-8")
    print(*(f"{name}: {now[name]:g}, at most {lower[name]:g}" for name in lower), sep="\n")
