"""A checkpoint with a wrong value in any place of any entry: the resumed run trains, or an error names the file.

The manifest is signed again, as by somebody who wrote all of it; nothing outside of the run's directory changes.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.checkpoint.training_state import load_plain
from trainwright.errors import TrainwrightError

from .._support.small import sign_again
from .test_extension_laws import MEMBERS, made

DEEP: Any = None
for _ in range(500):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    math.nan,
    -1,
    10**400,
    "../../victim",
    [],
    {},
    None,
    DEEP,
    True,
    1e308,
    {"a": {"b": "c"}},
    [[1]],
    -(2**70),
    "\x1b[2J",
    torch.zeros(0),
    torch.full((2,), math.nan),
)
NUM_KEYS = 8  # of a dict whose values are tried
NUM_ITEMS = 3  # of a list
# Capabilities with entries in a checkpoint; those of every run are tried with the first.
STATEFUL = ("average", "curriculum", "rollback", "checkpoint items", "recorded metrics", "a user's")
OF_EVERY_RUN = ("trainer_state.json", "scheduler.pt", "rng_state.pth", "training_args.json")
# The manifest, the weights and the optimizer have tests of their own.
ELSEWHERE = ("manifest.json", "model.safetensors", "optimizer.pt", "training_args.bin")


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to each value within another."""
    yield place
    if isinstance(value, dict):
        for key in [*value][:NUM_KEYS]:
            yield from places(value[key], (*place, key))
    elif isinstance(value, (list, tuple)):
        for number in range(min(len(value), NUM_ITEMS)):
            yield from places(value[number], (*place, number))


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = list(value) if isinstance(value, tuple) else copy.copy(value)
    changed[place[0]] = replaced(value[place[0]], place[1:], new)
    return tuple(changed) if isinstance(value, tuple) else changed


def cases(path: Path, every: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields places of an entry, each with some of the values in turn."""
    content = json.loads(path.read_text()) if path.suffix == ".json" else load_plain(path)
    for number, place in enumerate(places(content)):
        for new in VALUES[number % every :: every]:
            yield place, replaced(content, place, new)


def can_write(content: Any, path: Path) -> bool:
    try:
        if path.suffix == ".json":
            path.write_text(json.dumps(content))
        else:
            torch.save(content, path)
    except (TypeError, ValueError, RecursionError, OverflowError):
        return False
    return True


@pytest.mark.costly
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [pytest.param(4, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_wrong_value_in_any_place_is_named_or_does_no_harm(name: str, every: int, tmp_path: Path) -> None:
    settings = {
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_async": False,
        "logging_steps": 3,
        "log_level": "error",
    }
    trainer = made(tmp_path / "run", name, **settings)
    MEMBERS[name].prepare(trainer)
    trainer.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    (tmp_path / "victim").mkdir()
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    raw = []
    num_cases = 0
    for path in sorted((tmp_path / "kept" / "checkpoint-2").iterdir()):
        if path.name in ELSEWHERE or (path.name in OF_EVERY_RUN and name != STATEFUL[0]):
            continue
        for place, content in cases(path, every):
            shutil.rmtree(tmp_path / "run")
            shutil.copytree(tmp_path / "kept", tmp_path / "run")
            checkpoint = tmp_path / "run" / "checkpoint-2"
            if not can_write(content, checkpoint / path.name):
                continue
            sign_again(checkpoint)
            num_cases += 1
            trainer = made(tmp_path / "run", name, **settings)
            MEMBERS[name].prepare(trainer)
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint))
            except TrainwrightError as error:
                if "\x1b" in str(error):
                    raw.append(f"{path.name} {place}: control characters")
            except Exception as error:  # any other is a finding
                raw.append(f"{path.name} {place}: {error!r}")
            else:
                assert all(torch.isfinite(one).all() for one in trainer.model.parameters()), (path.name, place)
    assert num_cases > 0
    assert raw == []
    assert [*(tmp_path / "victim").iterdir()] == []
    assert {path.name for path in tmp_path.iterdir()} == {"run", "kept", "victim"}
