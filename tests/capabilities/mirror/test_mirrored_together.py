"""Copies of the checkpoints of two processes, whole and in shards, resume in an empty directory to the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.capabilities.mirror.shares import find_owner

from ..._support.stores import fresh_url
from ..._support.two_processes import run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_two_processes_resume_from_copies_on_server_and_each_reads_its_own(
    tmp_path: Path, servers: Callable[[str], dict[str, str]]
) -> None:
    with fresh_url("s3", servers) as url:
        done = run(Path(__file__).with_name("mirrored_together.py"), str(tmp_path), url, folder=tmp_path)
    assert len(done.told) == 2
    for engine in ("ddp", "sharded"):
        told = [one[engine] for one in done.told]
        for found in told:
            assert (found["step"], found["same"], found["copies"][0]) == (6, True, 6)
            assert not any(found["problems"])
        assert_each_read_its_own([found["read"] for found in told], told[0]["sizes"])


def assert_each_read_its_own(read: list[dict[str, int]], sizes: dict[str, int]) -> None:
    """Each byte of the checkpoint was requested once, and the files of a process by that process."""
    assert not read[0].keys() & read[1].keys()
    assert read[0] | read[1] == {name: size for name, size in sizes.items() if size > 0}
    owners: dict[str, Any] = {name: find_owner(name) for name in sizes}
    assert {0, 1} <= {*owners.values()}
    for rank in (0, 1):
        assert {name for name, owner in owners.items() if owner == rank} <= read[rank].keys()
