"""`trainwright check --processes`: the plan of a run of many processes, from a file that is made for a launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from .commands import SMALL, call, done, small

pytestmark = [pytest.mark.costly, pytest.mark.filterwarnings("default")]


@pytest.mark.more
def test_file_with_its_engine_is_planned_and_plan_is_in_the_json(tmp_path: Path) -> None:
    config = small(tmp_path, SMALL + "  fsdp: shard_grad_op\n")
    report = json.loads(done("check", str(config), "--processes", "16", "--per-node", "8", "--json"))
    plan = report["plan"]
    assert (plan["num_processes"], plan["per_node"], plan["engine"]) == (16, 8, "shard_grad_op")
    assert plan["num_steps"] == 8
    assert [rank["name"] for rank in plan["ranks"]] == ["rank 0", "rank 15"]
    assert {"all_gather", "reduce_scatter"} <= {one["name"] for one in plan["collectives"]}
    assert not dist.is_initialized()


def test_the_engine_of_a_command_counts_and_wrong_words_end_with_2(tmp_path: Path) -> None:
    config = small(tmp_path, SMALL + "  fsdp: true\n")
    text = done("check", str(config), "--processes", "4", "--engine", "ddp", "--budget", "1TB")
    assert "plan of 4 processes on 1 node: DDP" in text
    assert "it fits" in text
    refused = call("check", str(config), "--processes", "4", "--engine", "fast")
    assert refused.exit_code == 2
    assert "is not one of: ddp, fsdp2" in refused.output
    refused = call("check", str(small(tmp_path)), "--engine", "ddp")
    assert refused.exit_code == 2
    assert "say how many" in refused.output
