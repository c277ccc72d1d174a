"""Each capability under each fault, in each of its phases: the run, or its resume, ends as if nothing had happened.

Partners that hang and files of strangers have tests of their own, which `HANGS` and `HOSTILE` name, in `laws.py` of a
capability's tests; a capability is a row of `MEMBERS`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainwright.capabilities

from .._support import forked
from .members import read_laws
from .test_extension_laws import MEMBERS

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("quarantine",)
LAWS = read_laws()
NOT_HERE = {name: law.NOT_HERE for name, law in LAWS.items() if hasattr(law, "NOT_HERE")}
HANGS = {name: law.HANGS for name, law in LAWS.items()}
HOSTILE = {name: law.HOSTILE for name, law in LAWS.items()}


def test_no_cell_of_the_table_is_empty() -> None:
    home = Path(trainwright.capabilities.__path__[0])
    capabilities = {path.parent.name for path in home.glob("*/__init__.py")}
    rows = {member.name for member in MEMBERS.values()} | NOT_HERE.keys()
    assert capabilities <= rows
    assert [path for path in NOT_HERE.values() if not (ROOT / path).exists()] == []
    for table in (HANGS, HOSTILE):
        assert table.keys() == capabilities
        named = [cell.split("::") for cell in table.values() if "::" in cell]
        assert [cell for cell in named if f"def {cell[1]}(" not in (ROOT / "tests" / cell[0]).read_text()] == []


@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in MEMBERS])
def test_a_fault_in_any_phase_changes_nothing(name: str, tmp_path: Path) -> None:
    done = forked.run(["-m", "tests.laws.faults", str(tmp_path), name], timeout=880)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 3
    assert {fault: problem for fault, problem in found.items() if problem} == {}
