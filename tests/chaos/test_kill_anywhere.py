"""A run that is killed, anywhere, and started again with the same command ends with the weights of one that was not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from trainwright.checkpoint.store import CheckpointStore, verified

from .._support import forked
from .victim import NUM_STEPS

pytestmark = pytest.mark.process

VICTIM = Path(__file__).with_name("victim.py")
NEVER_ENDING = 60  # starts after which a test gives up

PLACES = [
    ("before _save_checkpoint", 2),
    ("before weights", 2),
    ("after weights", 2),
    ("after _save", 3),
    ("after _save_optimizer_and_scheduler", 2),
    ("after _save_rng_state", 2),
    ("before manifest", 2),
    ("after manifest", 2),
    ("before rename", 1),
    ("before rename", 2),
    ("after rename", 1),
    ("after fsync", 11),
    ("before rmtree", 5),
    ("after rmtree", 7),
    *(("after unlink", count) for count in (1, 2, 3, 5, 7)),  # in the middle of deleting an old one
    ("before torch.save", 7),
    ("after _save_checkpoint", 3),
    ("after training_step", 13),
]

Weights = dict[str, torch.Tensor]


class Nursery:
    """Starts runs in forks of one process, which waits for them."""

    def __init__(self, *arguments: str) -> None:
        self._process = forked.start([str(VICTIM), *arguments], stdin=True)

    def start(self, *arguments: object) -> int:
        """The process id of a new run, which stays taken until somebody waits for it."""
        process = self._ask(json.dumps([str(a) for a in arguments]))
        assert process > 1
        return process

    def wait(self) -> int:
        """The exit status of the run that was started last."""
        return self._ask("")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.communicate()

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def command(folder: Path, save_steps: int, *place: object) -> tuple[object, ...]:
    return (folder / "run", folder / "weights.safetensors", save_steps, *place)


def words(folder: Path) -> str:
    return (folder / "weights.safetensors.log").read_text()


def run_to_the_end(nursery: Nursery, folder: Path, save_steps: int) -> Weights:
    nursery.start(*command(folder, save_steps))
    assert nursery.wait() == 0, words(folder)
    return safetensors.torch.load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("uninterrupted")
    weights = run_to_the_end(nursery, folder, 3)
    assert CheckpointStore(folder / "run").steps() == [18, NUM_STEPS]
    return weights


def assert_same_end(folder: Path, uninterrupted: Weights) -> None:
    weights = safetensors.torch.load_file(folder / "weights.safetensors")
    assert [name for name in uninterrupted if not torch.equal(weights[name], uninterrupted[name])] == []
    left = sorted(path for path in (folder / "run").iterdir() if path.name.startswith("."))
    # A process that is killed between creating and writing its draft of a lease leaves one that nobody can read. A
    # run removes it once it is a minute old: until then a process of another machine may be writing it.
    left = [path for path in left if not (path.match(".lease.*.partial") and path.stat().st_size == 0)]
    assert left == [], "half-written directories are left behind"
    for path in (folder / "run").glob("checkpoint-*"):
        assert verified(path).path == path


# One place of each part of a save; the other places of the same part are slow.
REPRESENTATIVES = {
    ("after weights", 2),
    ("before manifest", 2),
    ("before rename", 2),
    ("after rename", 1),
    ("after fsync", 11),
    ("before rmtree", 5),
}


@pytest.mark.parametrize(
    ("place", "count"),
    [pytest.param(*one, marks=[] if one in REPRESENTATIVES else pytest.mark.slow) for one in PLACES],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_killed_at_a_place(place: str, count: int, nursery: Nursery, uninterrupted: Weights, tmp_path: Path) -> None:
    nursery.start(*command(tmp_path, 3, place, count))
    assert nursery.wait() == 137, f"it never came by: {words(tmp_path)}"
    run_to_the_end(nursery, tmp_path, 3)
    assert_same_end(tmp_path, uninterrupted)


def killed_again_and_again(nursery: Nursery, folder: Path, draw: random.Random) -> int:
    """Starts and kills until a start gets to the end; the number of kills."""
    for kills in range(NEVER_ENDING):
        process = nursery.start(*command(folder, 1))
        time.sleep(draw.uniform(0.02, 0.05 * 1.1**kills))  # in the end longer than a run takes on a busy machine
        os.kill(process, signal.SIGKILL)
        status = nursery.wait()
        if status == 0:
            return kills
        assert status == -signal.SIGKILL, words(folder)
    pytest.fail(f"killed {NEVER_ENDING} times and never at the end")


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])  # one stands for many
def test_killed_at_random_moments(seed: int, nursery: Nursery, uninterrupted: Weights, tmp_path: Path) -> None:
    killed_again_and_again(nursery, tmp_path, random.Random(seed))
    assert_same_end(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10, 22))
def test_killed_at_many_random_moments(seed: int, nursery: Nursery, uninterrupted: Weights, tmp_path: Path) -> None:
    killed_again_and_again(nursery, tmp_path, random.Random(seed))
    assert_same_end(tmp_path, uninterrupted)


# -- fifty kills -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def num_places(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many places a run passes in its saves."""
    folder = tmp_path_factory.mktemp("counted")
    nursery.start(*command(folder, 3, "anywhere", 10**6))
    assert nursery.wait() == 0, words(folder)
    passed = [line for line in words(folder).splitlines() if line.startswith("places passed:")]
    return int(passed[0].rpartition(" ")[2])


def killed_in_a_save(seed: int, nursery: Nursery, num_places: int, uninterrupted: Weights, folder: Path) -> None:
    """At a place drawn at random; every other run writes its checkpoints in the background."""
    draw = random.Random(seed)
    how = ("behind",) if seed % 2 else ()
    for _ in range(NEVER_ENDING):  # a run in the background may pass by fewer places
        shutil.rmtree(folder / "run", ignore_errors=True)
        nursery.start(*command(folder, 3, "anywhere", draw.randint(1, num_places), *how))
        if nursery.wait() == 137:
            break
    else:
        pytest.fail("it was never killed")
    nursery.start(*command(folder, 3, "", 0, *how))
    assert nursery.wait() == 0, words(folder)
    assert_same_end(folder, uninterrupted)


@pytest.mark.parametrize("seed", range(4))
def test_killed_in_a_save(seed: int, nursery: Nursery, num_places: int, uninterrupted: Weights, tmp_path: Path) -> None:
    killed_in_a_save(seed, nursery, num_places, uninterrupted, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_fifty_kills_in_a_save(
    seed: int, nursery: Nursery, num_places: int, uninterrupted: Weights, tmp_path: Path
) -> None:
    killed_in_a_save(seed, nursery, num_places, uninterrupted, tmp_path)


@pytest.mark.parametrize(
    ("place", "count"), [("after rename", 1), ("before rename", 2)], ids=lambda value: str(value).replace(" ", "-")
)
def test_killed_while_the_only_checkpoint_is_replaced(place: str, count: int, nursery: Nursery, tmp_path: Path) -> None:
    """A second save of the same step: the old one or the new one, one of them must be found."""
    run_to_the_end(nursery, tmp_path, NUM_STEPS)
    nursery.start("save over", tmp_path / "run", "new", place, count)
    assert nursery.wait() == 137
    store = CheckpointStore(tmp_path / "run")
    store.clean()
    assert store.latest() is not None


# -- all features at once --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery_of_all() -> Iterator[Nursery]:
    nursery = Nursery("all")
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def uninterrupted_all(nursery_of_all: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("all")
    nursery_of_all.start(*command(folder, 4, "", 0, "all"))
    assert nursery_of_all.wait() == 0, words(folder)
    return safetensors.torch.load_file(folder / "weights.safetensors")


@pytest.mark.parametrize(
    "num_kills",
    [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],  # minutes: 50 starts
)
def test_killed_with_all_features_at_once(
    num_kills: int, nursery_of_all: Nursery, uninterrupted_all: Weights, tmp_path: Path
) -> None:
    """A stream, packed, in workers; accumulation, background saves, rotation, evaluations, the best model."""
    draw = random.Random(num_kills)
    kills = 0
    ends = 0
    while kills < num_kills or ends == 0:
        process = nursery_of_all.start(*command(tmp_path, 4, "", 0, "all"))
        if kills < num_kills:
            time.sleep(draw.uniform(0.1, 2.5))
            os.kill(process, signal.SIGKILL)
        status = nursery_of_all.wait()
        if status == -signal.SIGKILL:
            kills += 1
            continue
        assert status == 0, words(tmp_path)
        assert_same_end(tmp_path, uninterrupted_all)
        ends += 1
        shutil.rmtree(tmp_path / "run")
