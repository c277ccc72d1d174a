"""Signals at moments drawn at random, in every phase of a run: each lands, and the run goes on as if it had not."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright import get_last_checkpoint

from .._support import forked

pytestmark = pytest.mark.process

NURSERY = Path(__file__).with_name("nursery.py")
PHASES = ("train", "evaluate", "save", "data")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Nursery:
    def __init__(self) -> None:
        self._process = forked.start([str(NURSERY)], stdin=True)

    def run(self, folder: Path, phase: str = "none", number: int = 0, seed: int = 0) -> int:
        """The exit code of a run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), phase, number, seed]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.communicate(60)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def uninterrupted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    folder = tmp_path_factory.mktemp("whole")
    assert nursery.run(folder) == 0, (folder / "words").read_text()
    return results(folder)


def results(folder: Path) -> tuple[bytes, str]:
    return (folder / "final.safetensors").read_bytes(), (folder / "log.json").read_text()


def lands(nursery: Nursery, phase: str, seed: int, uninterrupted: tuple[bytes, str], folder: Path) -> None:
    number = SIGNALS[seed % len(SIGNALS)]
    code = nursery.run(folder, phase, number, seed)
    words = (folder / "words").read_text()
    assert code == 128 + number, words
    said = re.search(rf"Interrupted by {number.name} after step (\d+), which is (saved|not saved)", words)
    assert said is not None, words
    step = int(said[1])
    assert said[2] == ("saved" if step else "not saved")
    if step:
        assert get_last_checkpoint(folder) == str(folder / f"checkpoint-{step}")
    assert nursery.run(folder, seed=seed) == 0, (folder / "words").read_text()
    assert results(folder) == uninterrupted


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_lands(phase: str, nursery: Nursery, uninterrupted: tuple[bytes, str], tmp_path: Path) -> None:
    for seed in (1, 2):
        lands(nursery, phase, seed, uninterrupted, tmp_path / str(seed))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(100, 120))
def test_twenty_signals_land_in_each_phase(
    phase: str, seed: int, nursery: Nursery, uninterrupted: tuple[bytes, str], tmp_path: Path
) -> None:
    lands(nursery, phase, seed, uninterrupted, tmp_path / "run")
