"""Copies of the checkpoints of two nodes: with a disk for each, and with sharded checkpoints on a common disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.capabilities.mirror.shares import find_owner

from ..._support.stores import fresh_url
from ..._support.two_processes import run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def told_by(case: str, folder: Path, servers: Callable[[str], dict[str, str]]) -> list[dict[str, Any]]:
    with fresh_url("s3", servers) as url:
        script = Path(__file__).with_name("nodes_together.py")
        return run(script, str(folder), url, case, folder=folder).told


def test_nodes_with_disks_of_their_own_resume_on_new_machines(
    tmp_path: Path, servers: Callable[[str], dict[str, str]]
) -> None:
    """Without a URL; with both machines new, one of them, and one of them where the newest checkpoint is at no URL."""
    for told in told_by("disks", tmp_path, servers):
        assert (told["local"], told["both"], told["one"], told["older"]) == (True, True, True, True)
        assert told["there"][-1] == 6
        assert told["steps"][-1] == 6


def test_each_node_sends_what_its_processes_wrote(tmp_path: Path, servers: Callable[[str], dict[str, str]]) -> None:
    told = told_by("parts", tmp_path, servers)
    for rank, one in enumerate(told):
        assert one["same"]
        assert one["problems"] == []
        assert one["steps"][0] == 6
        assert one["left"] == []
        shards = [name for name in one["sent"] if name.endswith(".distcp")]
        assert shards
        assert {find_owner(name) for name in shards} == {rank}
    assert "pytorch_model_fsdp_0/.metadata" in told[0]["sent"]


def test_what_a_node_cannot_send_the_first_one_sends(tmp_path: Path, servers: Callable[[str], dict[str, str]]) -> None:
    told = told_by("dead", tmp_path, servers)
    assert told[1]["sent"] == []
    for one in told:
        assert one["same"]
        assert one["problems"] == []
        assert one["steps"][0] == 6
    assert {0, 1} <= {find_owner(name) for name in told[0]["sent"]}
