"""The sources do not grow, and `Any` does not spread."""

from __future__ import annotations

from pathlib import Path

import pytest

from .ratchet import limits, measured, num_any


@pytest.mark.parametrize("name", ["lines", "any_per_100_lines"])
def test_no_size_rises(name: str) -> None:
    now, limit = measured()[name], limits()[name]
    assert now <= limit, f"{name} is {now:g}; tests/contract/ratchet.json allows {limit:g}. Remove before you add."


def test_uses_count_and_imports_do_not() -> None:
    text = "import typing\nfrom typing import Any\n\ndef f(x: Any, y: list[Any]) -> typing.Any:\n    z: 'str' = x\n"
    assert num_any(text) == 3


def test_lines_are_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("from typing import Any\nx: Any = 1\n")
    (tmp_path / "inner" / "b.py").write_text("y = 1\n" * 48)
    assert measured(tmp_path) == {"lines": 50, "any_per_100_lines": 2.0}
