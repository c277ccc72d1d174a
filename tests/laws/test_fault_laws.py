"""Each capability under each fault, in each of its phases: the run, or its resume, ends as if nothing had happened.

Partners that hang and files of strangers have tests of their own, which `HANGS` and `HOSTILE` name; a capability is a
row of `MEMBERS`.
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
    "lost_updates": "tests/capabilities/lost_updates",
    "what_is_trained": "tests/capabilities/what_is_trained",
    "slow_ranks": "tests/capabilities/slow_ranks",
    "mixture": "tests/capabilities/mixture",
    "packing": "tests/capabilities/packing",
    "token_budget": "tests/capabilities/token_budget",
}
ENTRIES = "laws/test_hostile_entry_laws.py::test_a_wrong_value_in_any_place_is_named_or_does_no_harm"
PARTNERS = "laws/test_partners_that_hang.py"
CONTROL = "capabilities/control/test_control_laws.py"
JOURNALS = "journal/test_hostile_journals.py"
ASYNC = "capabilities/async_evaluation/test_async_evaluation_laws.py"
REMOTE = "capabilities/mirror/test_remote.py"
VALUES = "capabilities/recorded_values/test_hostile_values.py"
# Capability -> the test in which a partner of it hangs, or why it waits for none.
HANGS = {
    "async_evaluation": f"{PARTNERS}::test_an_evaluating_process_that_hangs",
    "averages": "computes in the process that trains",
    "branch": "reads files of a directory before step 1",
    "checkpoint_items": "calls objects of the user, as the loop does",
    "control": f"{CONTROL}::test_directory_or_link_with_a_name_of_ours_stays_and_stops_nothing",
    "curriculum": "calls a function of the user, as the loop does",
    "experts": "computes in the process that trains",
    "guard": "computes in the process that trains",
    "incidents": "writes files of its own",
    "lease": "capabilities/lease/test_lease.py::test_a_lease_that_is_not_a_regular_file_is_ignored",
    "ledger": "writes files of its own",
    "loss_question": "computes in the process that trains",
    "loss_scale": "computes in the process that trains",
    "mirror": f"{PARTNERS}::test_a_resume_with_a_store_that_hangs",
    "quarantine": "reads a file of the run's directory before step 1",
    "recorded_metrics": "counts in the process that trains",
    "recorded_values": f"{VALUES}::test_a_pipe_is_not_waited_for",
    "lost_updates": "counts in the process that trains",
    "what_is_trained": "reads the first batch of the process that trains",
    "slow_ranks": "measures with the messages of a log",
    "mixture": "orders samples in the process that trains",
    "packing": "forms batches in the process that trains",
    "token_budget": "forms batches in the process that trains",
}
# Capability -> the test with files of a stranger, or why it reads none.
HOSTILE = {
    "async_evaluation": f"{ASYNC}::test_the_state_of_a_strangers_checkpoint_deletes_nothing",
    "averages": ENTRIES,
    "branch": "capabilities/branch/test_branch_laws.py::test_a_damaged_checkpoint_is_no_origin",
    "checkpoint_items": ENTRIES,
    "control": f"{JOURNALS}::test_live_control_takes_or_refuses_a_journal_with_a_wrong_command",
    "curriculum": ENTRIES,
    "experts": "keeps no state",
    "guard": ENTRIES,
    "incidents": "capabilities/incidents/test_hostile_bundles.py::test_each_damage_to_each_file_is_refused",
    "lease": "capabilities/lease/test_lease.py::test_a_file_that_is_not_a_lease_counts_by_its_time",
    "ledger": "capabilities/ledger/test_ledger.py::test_a_ledger_that_no_run_writes_ends_in_a_sentence",
    "loss_question": "keeps no state",
    "loss_scale": "keeps no state",
    "mirror": f"{REMOTE}::test_mark_or_manifest_of_stranger_deletes_only_what_it_lists_in_directory",
    "quarantine": "capabilities/quarantine/test_quarantine.py::test_a_line_that_no_run_writes_is_named",
    "recorded_metrics": ENTRIES,
    "recorded_values": f"{VALUES}::test_a_wrong_value_in_any_place_is_an_error_or_a_difference",
    "what_is_trained": "keeps no state",
    "lost_updates": "capabilities/lost_updates/test_lost_updates.py::test_a_strangers_state_begins_at_zero",
    "mixture": "capabilities/mixture/test_mixture_order.py::test_shares_that_no_run_writes_are_refused",
    "packing": "keeps no state",
    "token_budget": "keeps no state",
    "slow_ranks": "keeps no state",
}


def test_no_cell_of_the_table_is_empty() -> None:
    homes = [Path(package.__path__[0]) for package in (trainwright.capabilities, trainwright.extensions)]
    capabilities = {path.parent.name for home in homes for path in home.glob("*/__init__.py")}
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
