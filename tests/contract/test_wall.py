"""The wall: what is left of the package without all that lies outside of it still trains.

That is what the core is. Somebody who wants to know how a run goes reads the rest of the package, and nothing of these.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

import trainwright

from .._support.subprocesses import ROOT, run_python
from ..sources.imports import PACKAGE, Import, read
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
