"""`accelerator_config.use_configured_state`: accelerate's state that the user made is taken as it is, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState

from trainwright.errors import ArgumentError

from ..parity import data, models
from ..parity.sides import OURS


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trainer(folder: Path, **settings: Any) -> Any:
    asked = {"accelerator_config": {"use_configured_state": True}, "max_steps": 2}
    model = models.seeded(lambda: models.ReturnsDict(0.0))
    return OURS.make(model, folder, asked | settings, train_dataset=data.vectors(16))


def test_the_state_stays_the_users(tmp_path: Path) -> None:
    mine = Accelerator(cpu=True, mixed_precision="bf16")
    mine.state.mark = "mine"
    made = trainer(tmp_path, bf16=True)
    made.train()
    assert made.accelerator.state.mark == "mine"
    assert mine.state.mixed_precision == "bf16"
    other = OURS.make(models.seeded(lambda: models.ReturnsDict(0.0)), tmp_path, {})
    assert not hasattr(other.accelerator.state, "mark")  # without the setting it is made anew


def test_a_partial_state_is_enough(tmp_path: Path) -> None:
    PartialState(cpu=True)
    made = trainer(tmp_path, bf16=True)
    made.train()
    assert made.accelerator.mixed_precision == "bf16"


def test_without_a_state_there_is_nothing_to_take(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"use_configured_state=True.*PartialState\(\)"):
        trainer(tmp_path)


def test_a_state_in_another_precision_is_refused_with_both(tmp_path: Path) -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ArgumentError, match=r"mixed_precision='bf16'.*'no'"):
        trainer(tmp_path)
