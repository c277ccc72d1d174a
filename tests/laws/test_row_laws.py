"""What a whole run must hold on every backend, with one process and with two: checkpoints, skipped steps, hooks."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import psutil
import pytest

from .._support.two_processes import Done, finish, free_port, launch
from ..contract.surface import EVENTS
from ..contract.test_hooks_reached import REACHED
from ..distributed.cases import trainer_of
from . import rows

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
WORLDS = (1, 2)
SCRIPT = Path(__file__).with_name("rows.py")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.slow]
each_row = pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.skipif(row.startswith("zero") and not HAS_DEEPSPEED, reason="no deepspeed"))
        for row in rows.ROWS
    ],
)
each_world = pytest.mark.parametrize("world", WORLDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def launched(what: str, folder: Path, world: int) -> Done:
    """One launch for all rows; nothing of it is there when it has ended."""
    told = folder / f"{what} {world}"
    port = free_port()
    told.mkdir()
    names = [row for row in rows.ROWS if HAS_DEEPSPEED or not row.startswith("zero")]
    launcher = (
        "torch.distributed.run",
        "--nproc-per-node",
        str(world),
        "--master-addr",
        "localhost",
        "--master-port",
        str(port),
    )
    process = launch(
        SCRIPT, what, str(folder), *names, folder=told, launcher=launcher, environment={"DS_ACCELERATOR": "cpu"}
    )
    done = finish(process, told, timeout_s=400, processes=world)
    assert done.code == 0, done.out[-6000:]
    mark = ("TOLD_FOLDER", str(told))
    assert [one.pid for one in psutil.process_iter(["environ"]) if mark in (one.info["environ"] or {}).items()] == []
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("localhost", port))
    assert "destroy_process_group() was not called" not in done.out
    return done


@pytest.fixture(scope="module")
def first(folder: Path) -> dict[int, Done]:
    return {world: launched("saves", folder, world) for world in WORLDS}


@pytest.fixture(scope="module")
def then(folder: Path, first: dict[int, Done]) -> dict[int, Done]:
    return {world: launched("goes_on", folder, world) for world in WORLDS}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return rows.losses(trainer_of(rows.SAVED, tmp_path_factory.mktemp("alone"), 1))


@each_world
@pytest.mark.parametrize("writers", WORLDS)
@each_row
def test_a_checkpoint_goes_on_with_the_same_loss(
    row: str, writers: int, world: int, then: dict[int, Done], alone: list[float]
) -> None:
    for told in then[world].told:
        assert told[f"{row} by {writers}"] == pytest.approx(alone, rel=1e-5)


@each_world
@each_row
def test_a_skipped_step_leaves_weights_and_schedule(row: str, world: int, first: dict[int, Done]) -> None:
    """The gradients overflowed in one process alone."""
    moved = [number != rows.SPOILT_STEP for number in range(1, rows.STEPS + 1)]
    assert first[world].told[0][f"{row}: moved"] == moved
    for told in first[world].told:
        assert told[f"{row}: schedule"] == [int(one) for one in moved]


@each_world
@each_row
def test_every_hook_is_reached(row: str, world: int, first: dict[int, Done]) -> None:
    for told in first[world].told:
        events = {event for event in EVENTS if event != "on_push_begin"}
        assert (REACHED | events) - set(told[f"{row}: reached"]) == set()
