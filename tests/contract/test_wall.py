"""The wall: what is left of the package without all that lies outside of it still trains.

That is what the core is. Somebody who wants to know how a run goes reads the rest of the package, and nothing of these.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

import trainwright
from trainwright.capability_table import CAPABILITIES, TABLE, load

from .._support.subprocesses import ROOT, run_python
from ..sources.imports import PACKAGE, Import, read
from ..sources.parsed import parse_file
from ..sources.test_imports_go_down import part_of

SOURCE = Path(trainwright.__file__).parent
SCRIPT = Path(__file__).with_name("behind_the_wall.py")
OUTSIDE = ("capabilities", "cli", "report", "compat", "trackers", "hub", "search", "preflight")


def copy_core(folder: Path) -> Path:
    """Returns a path with a copy of the package without what is outside, and without the rows that lead there."""
    copy = folder / "package" / "trainwright"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in OUTSIDE:
        shutil.rmtree(copy / name)
    table = copy / "capability_table.py"
    text = table.read_text(encoding="utf-8")
    head = "ROWS: tuple[CapabilityRow, ...] = ("
    shorter = re.sub(rf"^{re.escape(head)}.*?^\)$", f"{head})", text, flags=re.M | re.S)
    assert shorter != text, "the table was not found"
    table.write_text(shorter, encoding="utf-8")
    return copy.parent


@pytest.mark.process
def test_the_core_trains_alone(tmp_path: Path) -> None:
    path = os.pathsep.join([str(copy_core(tmp_path)), str(ROOT)])
    run_python(str(SCRIPT), str(tmp_path / "runs"), PYTHONPATH=path, cwd=tmp_path)


# Module of the core -> modules outside that it imports, for a type alone (in brackets) or in a function, and why. An
# entry may only be removed: what lies outside is found through `capability_table.py`.
TIES = {
    "trainer": {
        "capabilities.recorded_values.value_comparison": "(type) of compare_with",
        "preflight.check_registry": "(type) of check",
        "preflight.prove": "(type) of prove",
        "search.base": "(type) of hyperparameter_search",
    },
}


def find_ties(imports: Iterable[Import]) -> set[tuple[str, str]]:
    """Returns the pairs of a module of the core and a module outside that it imports, types included."""
    outside = (*OUTSIDE, "__main__")
    return {
        (one.importer.removeprefix(f"{PACKAGE}."), one.module.removeprefix(f"{PACKAGE}."))
        for one in imports
        if one.package == PACKAGE and one.importer != PACKAGE  # the root has names alone
        if part_of(one.module) in outside and part_of(one.importer) not in outside
    }


@pytest.mark.lint
def test_the_core_imports_nothing_from_outside_but_these() -> None:
    expected = {(importer, module) for importer, modules in TIES.items() for module in modules}
    assert find_ties(read(SOURCE)) == expected


@pytest.mark.lint
def test_a_planted_tie_is_found(tmp_path: Path) -> None:
    for name in ("loop", "capabilities"):
        (tmp_path / name).mkdir()
    (tmp_path / "capabilities" / "guard.py").touch()
    (tmp_path / "loop" / "step.py").write_text("def f():\n    from trainwright.capabilities import guard")
    assert find_ties(read(tmp_path)) == {("loop.step", "capabilities.guard")}


# What a run can do with its data, and none of it is the data's own: `data/` finds these through the table.
OPTIONS = re.compile("mixture|curricul|quarantine|packing|ledger", re.IGNORECASE)
# The help of `id_column` says which files have the names of rows.
NAMED_IN = {"fields.py": 2}


@pytest.mark.lint
def test_data_names_no_option() -> None:
    folder = SOURCE / "data"
    counts = {
        path.relative_to(folder).as_posix(): len(OPTIONS.findall(path.read_text(encoding="utf-8")))
        for path in folder.rglob("*.py")
    }
    assert {name: number for name, number in counts.items() if number} == NAMED_IN


# Modules outside of the capabilities -> the arguments of one that they ask for by name, and why.
ASKED = {
    "cli/tasks/models.py": {"branch_from": "a branch continues a run, as a resume does"},
    "config/resolve.py": {"on_nonfinite": "a checkpoint refuses weights that are not finite, as a step does"},
    "preflight/compare_values.py": {"record_values": "two trainers are compared by what this records"},
}


def find_asked(tree: ast.AST, owned: set[str]) -> set[str]:
    """Returns the arguments among `owned` that code reads: `args.name`, `get_value(args, "name")`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            found |= {node.attr} if owner == "args" else set()
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("get_value", "value_if_known"):
            found |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
    return found & owned


@pytest.mark.lint
def test_an_argument_of_a_capability_is_asked_for_inside_of_it() -> None:
    rows = [row for row in TABLE if row.fields.startswith(CAPABILITIES)]
    owned = {name for row in rows for name in load(row.fields).settings}
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        asked = set() if name.startswith("capabilities/") else find_asked(parse_file(path), owned)
        if asked:
            found[name] = asked
    assert found == {name: {*reasons} for name, reasons in ASKED.items()}
