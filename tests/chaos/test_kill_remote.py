"""A run that is killed at any call of a store or place of a save, and goes on in an empty directory, ends the same."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from trainwright.capabilities.mirror.lease import RELEASED
from trainwright.capabilities.mirror.remote import RemoteStore

from .._support.stores import fresh_url, missing_packages
from .test_kill_anywhere import NEVER_ENDING, Nursery, Weights, words
from .victim import NUM_STEPS

pytestmark = pytest.mark.process

SAVE_STEPS = 3
MOST_CALLS = 120  # of a store, in a whole run


@pytest.fixture(scope="module")
def nursery(servers: Callable[[str], dict[str, str]]) -> Iterator[Nursery]:
    """Runs that know the S3 server."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ({} if missing_packages("s3") else servers("s3")).items():
            patched.setenv(name, value)
        nursery = Nursery()
    yield nursery
    nursery.close()


def start(nursery: Nursery, folder: Path, place: str, count: int, how: str) -> int:
    """Runs until the end or the place; the exit code."""
    folder.mkdir(exist_ok=True)
    nursery.start(folder / "run", folder / "weights.safetensors", SAVE_STEPS, place, count, how)
    return nursery.wait()


@pytest.fixture(scope="module")
def uninterrupted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert start(nursery, folder, "", 0, "behind") == 0, words(folder)
    return safetensors.torch.load_file(folder / "weights.safetensors")


def killed_until_it_ends(nursery: Nursery, folder: Path, url: str, draw: random.Random, most: int) -> int:
    """Starts a run again and again, each time with an empty directory; the number of kills."""
    for kills in range(NEVER_ENDING):
        shutil.rmtree(folder, ignore_errors=True)
        place = draw.choice(["put", "put", "anywhere"])
        count = draw.randint(1, MOST_CALLS) if kills < most else 0
        code = start(nursery, folder, place, count, url)
        if code == 0:
            return kills
        assert code == 137, words(folder)
    pytest.fail(f"killed {NEVER_ENDING} times and never at the end")


@pytest.mark.parametrize(
    ("kind", "num_kills"),
    [
        ("s3", 2),
        ("file", 2),
        pytest.param("s3", 60, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),  # minutes: over 100 starts
        pytest.param("file", 40, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_killed_at_puts_and_saves(
    kind: str,
    num_kills: int,
    nursery: Nursery,
    uninterrupted: Weights,
    tmp_path: Path,
    servers: Callable[[str], dict[str, str]],
) -> None:
    draw = random.Random(num_kills)
    kills = 0
    with fresh_url(kind, servers) as top:
        for number in range(NEVER_ENDING):
            url = f"{top}/{number}"
            kills += killed_until_it_ends(nursery, tmp_path / "machine", url, draw, num_kills - kills)
            assert_same_end(tmp_path / "machine", url, uninterrupted)
            if kills >= num_kills:
                return
    pytest.fail("it was hardly ever killed")


def assert_same_end(folder: Path, url: str, uninterrupted: Weights) -> None:
    weights = safetensors.torch.load_file(folder / "weights.safetensors")
    assert [name for name in uninterrupted if not torch.equal(weights[name], uninterrupted[name])] == []
    store = RemoteStore(url)
    found = store.manifests()
    assert found[0].step == NUM_STEPS
    # A kill between a copy and the deletion of an older one leaves that until the next copy; two in a row, at the end
    # of a run, leave two more than the two that are kept.
    assert len(found) <= 4
    for one in found:
        assert list(store.problems(one)) == []
    leases = [name for name in store.names() if name.startswith(".lease-")]
    assert [store.read(name) for name in leases] == [RELEASED]
    assert sorted(store.names()) == sorted([*(copy.name for copy, _ in store.found()), "journal.jsonl", *leases])
