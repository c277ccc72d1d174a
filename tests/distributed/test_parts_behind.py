"""Checkpoints in parts that two processes write behind training's back: what is in them, and what ends one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainwright import get_last_checkpoint
from trainwright.checkpoint.deferred_io import CopyRequest, why_not_copy
from trainwright.checkpoint.store import CheckpointStore
from trainwright.engine import sharded_state
from trainwright.engine.sharded_state import read

from .._support.two_processes import Done, finish, launch, run

pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(__file__).with_name("parts_behind.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("behind")


@pytest.fixture(scope="module")
def done(folder: Path) -> Done:
    return run(SCRIPT, str(folder), folder=folder, timeout_s=200)


@pytest.mark.process
def test_training_goes_on_while_they_are_written(done: Done) -> None:
    for told in done.told:
        assert told["apart"] == [["checkpoint-writer", True]] * 6  # weights and optimizer of three checkpoints


@pytest.mark.process
@pytest.mark.parametrize("step", [2, 4, 6])
def test_they_hold_what_was_when_the_save_began(step: int, done: Done, folder: Path) -> None:
    behind, blocking = (folder / name / f"checkpoint-{step}" for name in ("behind", "blocking"))
    assert sorted(p.name for p in behind.iterdir()) == sorted(p.name for p in blocking.iterdir())
    for name, under in ((sharded_state.MODEL, "model"), (sharded_state.OPTIMIZER, "optimizer")):
        mine, others = (read(one / name, under=under) for one in (behind, blocking))
        assert mine.keys() == others.keys()
        assert mine
        for key, value in mine.items():
            assert torch.equal(value, others[key]), key


@pytest.mark.process
def test_a_run_goes_on_from_one(done: Done) -> None:
    for told in done.told:
        assert told["resumed"]["weights"] == told["whole"]["weights"]
        assert told["resumed"]["step"] == told["whole"]["step"]


@pytest.mark.process
def test_where_one_process_is_short_of_memory_all_write_at_once(done: Done) -> None:
    for told in done.told:
        assert told["short"] == ["MainThread"] * 6


@pytest.mark.process
def test_part_that_cannot_be_written_is_error_in_all_and_leaves_nothing(done: Done, folder: Path) -> None:
    for told in done.told:
        assert "CheckpointWriteError" in told["stopped"]
        assert "No space left on device" in told["stopped"]
    assert CheckpointStore(folder / "continued").steps() == [2, 6]
    assert CheckpointStore(folder / "stopped").steps() == [2]
    assert not list(folder.glob("*/.checkpoint-*"))


@pytest.mark.process
@pytest.mark.slow
def test_a_process_that_dies_meanwhile_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ended = finish(launch(SCRIPT, str(tmp_path), "killed", folder=tmp_path), tmp_path)
    assert ended.code != 0
    assert "done" not in ended.told[0]
    assert get_last_checkpoint(tmp_path / "killed") == str(tmp_path / "killed/checkpoint-2")
    CheckpointStore(tmp_path / "killed").clean()
    assert [p.name for p in (tmp_path / "killed").glob("*checkpoint-*")] == ["checkpoint-2"]


def test_processes_of_a_machine_share_its_memory() -> None:
    assert why_not_copy([CopyRequest("a", 40, 100), CopyRequest("b", 40, 100)]) is None
    assert "80 bytes" in str(why_not_copy([CopyRequest("a", 40, 100), CopyRequest("a", 40, 100)]))
    assert why_not_copy([CopyRequest("a", 1, 100), CopyRequest("b", 0, 0, "a sparse tensor")]) == "a sparse tensor"
