"""Ranges of versions: the tested set is within them, and the page names the bounded ones."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
NEEDED = {one.name: one for one in map(Requirement, PROJECT["dependencies"])}
TESTED = {name.lower(): version for name, version in PINS}


@pytest.mark.parametrize("name", NEEDED)
def test_the_tested_version_is_within_the_range(name: str) -> None:
    assert NEEDED[name].specifier.contains(TESTED[name])


def test_the_page_names_ranges_with_a_bound() -> None:
    page = (ROOT / "docs/install.md").read_text()
    for name, need in NEEDED.items():
        ends = {one.operator: Version(one.version) for one in need.specifier}
        if "<" not in ends:
            continue
        last = f"{ends['<'].major}.{ends['<'].minor - 1}" if ends["<"].minor else f"{ends['<'].major - 1}.x"
        assert re.search(rf"{name} {ends['>=']}\s+to\s+{re.escape(last)}\b", page), f"{name} {ends['>=']} to {last}"
