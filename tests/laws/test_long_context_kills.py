"""Runs that share sequences, layers or experts are killed, all processes of them, and end as if they had not been."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.checkpoint.store import CheckpointStore, verified

from .._support.engines import needs
from .._support.two_processes import end_group, finish_forks, start_forks
from .long_context import write_model
from .long_context_kinds import KINDS

# Four starts of up to four processes each.
pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("long_context_victim.py")
KILLED = ["cp", "sp", "ep", "cp + ep", "sp + ep", "cp + tp", "sp + zero 2", "cp + zero 3"]


def start(kind: str, folder: Path, *place: object) -> list[Any]:
    words = [str(folder), kind, *map(str, place)]
    return start_forks(SCRIPT, *words, folder=folder, processes=KINDS[kind].processes)


def ended(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Runs to the end, from a checkpoint where there is one."""
    done = finish_forks(start(kind, folder), folder, timeout_s=200)
    assert done.code == 0, done.out[-6000:]
    return [told["outcome"] for told in done.told]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    @functools.cache
    def run(kind: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("uninterrupted")
        write_model(KINDS[kind].cell, folder)
        return ended(kind, folder)

    return run


def killed_after_a_step(kind: str, folder: Path, draw: random.Random) -> None:
    """A moment in a step, or in the save of the one before, which is written meanwhile."""
    step = folder / "steps" / str(draw.randint(3, 5))
    step.unlink(missing_ok=True)
    ranks = start(kind, folder)
    until = time.monotonic() + 150
    while not step.exists():
        assert time.monotonic() < until, finish_forks(ranks, folder, timeout_s=1).out[-6000:]
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.2))
    for rank in ranks:
        end_group(rank)
    codes = [rank.wait(30) for rank in ranks]
    assert all(code < 0 for code in codes), "it had ended"
    finish_forks(ranks, folder)


def killed_in_a_save(kind: str, folder: Path, draw: random.Random) -> None:
    """At a place drawn at random, by the process that passes it; the others are killed as soon as that is seen."""
    rank = draw.randrange(2) if "fsdp_config" in KINDS[kind].settings else 0  # the one that writes
    most = 8 if CheckpointStore(folder / "run").steps() else 40  # a resumed run may have one save left
    done = finish_forks(start(kind, folder, rank, draw.randint(1, most)), folder, timeout_s=200)
    assert done.code != 0, "it came by less often"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[needs("deepspeed")] if "zero" in kind else []) for kind in KILLED]
)
def test_run_of_which_all_processes_are_killed_is_resumed_to_the_bit(
    kind: str, uninterrupted: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    draw = random.Random(kind)
    write_model(KINDS[kind].cell, tmp_path)
    for kill in draw.sample([killed_after_a_step, killed_in_a_save], 2):
        kill(kind, tmp_path, draw)
    for mine, other in zip(ended(kind, tmp_path), uninterrupted(kind), strict=True):
        assert mine["step"] == other["step"]
        assert mine["weights"] == other["weights"]
        assert mine["logits"] == other["logits"]
        assert steps_of(mine) == steps_of(other)
    for checkpoint in CheckpointStore(tmp_path / "run").steps():
        path = tmp_path / "run" / f"checkpoint-{checkpoint}"
        assert verified(path).path == path


def steps_of(told: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and norm of each step, before and after the kills."""
    return [(entry["loss"], entry["grad_norm"]) for entry in told["log"] if "loss" in entry]
