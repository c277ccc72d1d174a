"""Each capability under each fault, in each of its phases: the run, or its resume, ends as if nothing had happened.

Faults that need another partner have tests of their own, which `ELSEWHERE` names; a capability is a row of `MEMBERS`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainwright.capabilities
import trainwright.extensions

from .._support import forked
from .test_extension_laws import MEMBERS

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("quarantine",)
# Capabilities that one process on the CPU does not have.
NOT_HERE = {
    "experts": "tests/capabilities/experts",
    "loss_scale": "tests/accelerator/test_runs.py",
    "loss_question": "tests/laws/test_loss_laws.py",
    "recorded_values": "tests/capabilities/recorded_values",
    "slow_ranks": "tests/capabilities/slow_ranks",
}
# Capability -> where a partner that hangs, or a file of a stranger, is tried; the others have no partner and no file.
HANGS = {
    "async_evaluation": "tests/laws/test_async_evaluation_laws.py",
    "mirror": "tests/checkpoint/test_mirror.py",
    "lease": "tests/chaos/test_two_runs.py",
}
HOSTILE = {
    "async_evaluation": "tests/laws/test_async_evaluation_laws.py",
    "control": "tests/capabilities/control",
    "mirror": "tests/checkpoint/test_mirror.py",
    "lease": "tests/chaos/hostile",
    "ledger": "tests/chaos/hostile",
    "incidents": "tests/chaos/hostile",
}


def test_every_capability_is_a_row() -> None:
    homes = [Path(package.__path__[0]) for package in (trainwright.capabilities, trainwright.extensions)]
    capabilities = {path.parent.name for home in homes for path in home.glob("*/__init__.py")}
    rows = {member.name for member in MEMBERS.values()} | NOT_HERE.keys()
    assert capabilities <= rows
    for table in (NOT_HERE, HANGS, HOSTILE):
        assert table.keys() <= capabilities
        assert [path for path in table.values() if not (ROOT / path).exists()] == []


@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in MEMBERS])
def test_a_fault_in_any_phase_changes_nothing(name: str, tmp_path: Path) -> None:
    done = forked.run(["-m", "tests.laws.faults", str(tmp_path), name], timeout=880)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 3
    assert {fault: problem for fault, problem in found.items() if problem} == {}
