"""A run whose process group is signalled at any moment, and started again, ends with the weights of a quiet one."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from trainwright import get_last_checkpoint

from .test_kill_anywhere import Nursery, Weights, assert_same_end, command, words

pytestmark = pytest.mark.process

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_STEPS = 4


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery("all")
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def whole(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, float]:
    """The weights of an uninterrupted run, and the seconds that it took."""
    import safetensors.torch

    folder = tmp_path_factory.mktemp("whole")
    begin = time.monotonic()
    nursery.start(*command(folder, SAVE_STEPS, "", 0, "all"))
    assert nursery.wait() == 0, words(folder)
    seconds = time.monotonic() - begin
    return safetensors.torch.load_file(folder / "weights.safetensors"), seconds


def signalled_and_resumed(
    number: signal.Signals, seed: int, nursery: Nursery, whole: tuple[Weights, float], folder: Path
) -> str:
    """Returns how the signalled run ended."""
    weights, seconds = whole
    draw = random.Random(f"{number.name} {seed}")
    run = command(folder, SAVE_STEPS, "", 0, "all")
    process = nursery.start(*run)
    time.sleep(draw.uniform(0.0, seconds))
    with suppress(ProcessLookupError):
        os.killpg(process, number)
    status = nursery.wait()
    said = words(folder)
    # 0: it was over; -number or 130: it had not begun to train, or had ended: the process ends as it always would.
    assert status in (0, 128 + number, -number), said
    # A worker may print that its connection was reset, from a thread of multiprocessing, when the run ends.
    assert "RuntimeError" not in said, said
    ended = re.search(rf"Interrupted by {number.name} after step (\d+), which is (saved|not saved)", said)
    if ended is not None:
        assert status == 128 + number
        step = int(ended[1])
        assert ended[2] == ("saved" if step else "not saved")
        if step:
            assert get_last_checkpoint(folder / "run") == str(folder / "run" / f"checkpoint-{step}")
    nursery.start(*run)
    assert nursery.wait() == 0, words(folder)
    assert_same_end(folder, weights)
    shutil.rmtree(folder / "run")
    return ended[0] if ended is not None else f"status {status}"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signalled_at_a_random_moment(
    number: signal.Signals, nursery: Nursery, whole: tuple[Weights, float], tmp_path: Path
) -> None:
    """A stream, packed, in workers; accumulation, background saves, rotation, evaluations, the best model."""
    for seed in (1, 2):
        signalled_and_resumed(number, seed, nursery, whole, tmp_path)


@pytest.mark.slow  # a run and its resume take seconds, and there are 200: minutes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(100, 200, 10))
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_hundred_of_each_signal(
    number: signal.Signals, first: int, nursery: Nursery, whole: tuple[Weights, float], tmp_path: Path
) -> None:
    for seed in range(first, first + 10):
        print(number.name, seed, signalled_and_resumed(number, seed, nursery, whole, tmp_path))
