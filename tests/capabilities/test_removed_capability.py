"""The law of capabilities: each is one folder and one row, and without both the rest is whole.

From a copy of the package a capability's folder and its row of the table are deleted. What is left imports, trains,
evaluates, saves and resumes, and knows the arguments, commands and public names of the capability no longer. A
capability that builds on another one goes with it.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import trainwright
from trainwright.capability_table import CAPABILITIES, FORMER_MODULES, TABLE, CapabilityRow, load

from .._support.subprocesses import ROOT, run_python
from ..sources.imports import Import, read

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
    entry = rf'^    row\(\s*"{row.name}"(?:.*\),\n|,\n(?:        .*\n)*    \),\n)'
    shorter = re.sub(entry, "", text, count=1, flags=re.MULTILINE)
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
    gone = [row, *(one for one in TABLE if name in one.builds_on)]
    arguments = [argument for one in gone for argument in arguments_of(one)]
    words = {
        "COMMANDS_OF_IT": " ".join(entry.name for one in gone for entry in one.commands),
        "NAMES_OF_IT": " ".join(public for one in gone for names in one.names.values() for public in names),
    }
    run_python(str(SCRIPT), str(tmp_path / "runs"), *arguments, PYTHONPATH=path, cwd=tmp_path, **words)


read_imports = functools.cache(lambda: read(SOURCE))


def imports_between() -> set[tuple[str, str]]:
    """Returns the pairs of a capability and another one that it imports, also inside functions."""
    prefix = f"{CAPABILITIES}."
    found = set()
    for one in read_imports():
        if one.importer.startswith(prefix) and one.module.startswith(prefix):
            found.add((one.importer.split(".")[2], one.module.split(".")[2]))
    return {(one, other) for one, other in found if one != other}


@pytest.mark.lint
def test_a_capability_imports_no_other_but_those_that_it_builds_on() -> None:
    assert imports_between() == {(row.name, other) for row in TABLE for other in row.builds_on}


@pytest.mark.lint
def test_what_a_capability_builds_on_stands_above_it() -> None:
    names = [row.name for row in TABLE]
    assert [row.name for row in TABLE for other in row.builds_on if names.index(other) > names.index(row.name)] == []


# Modules of the command line and of the check-up that cannot be imported without a capability: what each is for is
# all about it.
LOST = {
    "incidents": {"cli.replay"},
    "ledger": {"cli.ledger"},
    "recorded_values": {"preflight.against", "preflight.against_process", "preflight.compare_values"},
}


def find_lost(name: str, imports: Collection[Import]) -> set[str]:
    """Returns the modules outside of the capabilities that import one when they are loaded, directly or not."""
    lost = {one.module for one in imports if one.module.startswith(f"{CAPABILITIES}.{name}.")}
    lost.add(f"{CAPABILITIES}.{name}")
    known = 0
    while known < len(lost):
        known = len(lost)
        lost |= {one.importer for one in imports if one.module in lost and not one.guarded}
    return {module.removeprefix("trainwright.") for module in lost if not module.startswith(f"{CAPABILITIES}.")}


@pytest.mark.lint
def test_no_module_outside_needs_a_capability_but_these() -> None:
    imports = [one for one in read_imports() if not one.for_types]
    found = {row.name: find_lost(row.name, imports) for row in WHOLE}
    assert {name: modules for name, modules in found.items() if modules} == LOST


def find_public(module: ModuleType) -> str:
    """Returns the name of a class or function that a module defines."""
    kinds = (type, FunctionType)
    return next(
        name for name, one in vars(module).items() if isinstance(one, kinds) and one.__module__ == module.__name__
    )


@pytest.mark.parametrize("path", FORMER_MODULES)
def test_a_former_path_leads_to_the_module_of_today(path: str) -> None:
    module = importlib.import_module(FORMER_MODULES[path])
    name = find_public(module)
    former = importlib.import_module(f"{trainwright.__name__}.{path}")
    assert getattr(former, name) is getattr(module, name)
