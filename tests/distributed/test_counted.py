"""A step asks the others for no more than a loop by hand does: what torch dispatches is counted, DDP's own included."""

from __future__ import annotations

from pathlib import Path

import pytest

from .._support.two_processes import Done, run

SCRIPT = Path(__file__).with_name("counted.py")
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("counted")
    return run(SCRIPT, str(folder / "run"), folder=folder, timeout_s=200)


@pytest.mark.parametrize("kind", ["ddp", "ddp, accumulated"])
def test_a_step_with_whole_models_sends_its_gradients_once(kind: str, done: Done) -> None:
    """Also where a step has several micro-batches."""
    ours, by_hand = done.told[0][kind]
    assert by_hand == {"c10d::allreduce_": 1}
    assert ours == by_hand


@pytest.mark.parametrize("kind", ["full_shard", "shard_grad_op"])
def test_a_step_with_parts_asks_for_no_more_than_by_hand(kind: str, done: Done) -> None:
    """Parameters are gathered, gradients scattered, and their norm summed."""
    ours, by_hand = done.told[0][kind]
    layers = by_hand["c10d::_reduce_scatter_base_"]
    assert layers > 1
    again = kind == "full_shard"  # for the backward pass
    assert (by_hand["c10d::_allgather_base_"] > layers) == again
    assert ours == by_hand
