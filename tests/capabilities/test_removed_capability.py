"""The law of capabilities: each is one folder and one row, and without both the rest is whole.

From a copy of the package a capability's folder and its row of the table are deleted. What is left imports, trains,
evaluates, saves and resumes, and knows the arguments and commands of the capability no longer.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import trainwright
from trainwright.capability_table import CAPABILITIES, TABLE, CapabilityRow, load

from .._support.subprocesses import ROOT, run_python

SOURCE = Path(trainwright.__file__).parent
SCRIPT = Path(__file__).with_name("without_one.py")
WHOLE = [row for row in TABLE if not row.capability or row.capability.startswith(f"{CAPABILITIES}.")]


def without(row: CapabilityRow, folder: Path) -> Path:
    """Returns a path with a copy of the package that lacks a capability."""
    copy = folder / "package" / "trainwright"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "capabilities" / row.name)
    table = copy / "capability_table.py"
    text = table.read_text(encoding="utf-8")
    shorter = re.sub(rf'^    [rR]ow\((?:name=)?"{row.name}".*\n', "", text, count=1, flags=re.MULTILINE)
    assert shorter != text, "the row was not found"
    table.write_text(shorter, encoding="utf-8")
    return copy.parent


def arguments_of(row: CapabilityRow) -> list[str]:
    return list(load(row.fields).settings) if row.fields else []


def test_a_folder_of_capabilities_is_a_row() -> None:
    folders = {path.name for path in (SOURCE / "capabilities").iterdir() if (path / "__init__.py").is_file()}
    assert folders == {row.name for row in WHOLE}


@pytest.mark.process
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [row.name for row in WHOLE])
def test_without_a_capability_the_rest_is_whole(name: str, tmp_path: Path) -> None:
    row = next(one for one in TABLE if one.name == name)
    path = os.pathsep.join([str(without(row, tmp_path)), str(ROOT)])
    commands = " ".join(entry.name for entry in row.commands)
    arguments = [str(tmp_path / "runs"), *arguments_of(row)]
    run_python(str(SCRIPT), *arguments, PYTHONPATH=path, COMMANDS_OF_IT=commands, cwd=tmp_path)
