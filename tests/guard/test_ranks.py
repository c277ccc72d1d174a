"""The decision is one for all processes, whichever of them has the bad sample."""

from pathlib import Path

import pytest

from .._support.two_processes import run

CASES = [
    f"{backend}, {kind}, rank {rank}"
    for backend in ("ddp", "fsdp")
    for kind in ("nan", "loss-alone", "gradient-alone")
    for rank in (0, 1)
]


@pytest.mark.process
def test_all_processes_skip_the_step_that_is_bad_in_one(tmp_path: Path) -> None:
    done = run(Path(__file__).with_name("ranks.py"), str(tmp_path / "runs"), folder=tmp_path, timeout_s=110)
    for told in done.told:
        assert {name: told[name] for name in CASES} == {name: [True, [2]] for name in CASES}
