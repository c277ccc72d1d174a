"""DDP on the stand-in accelerator: two processes with a device each, and collectives over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from .children import on_two_standins

pytestmark = pytest.mark.process

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "adamw by hand", "no clipping", "evaluation")]


@pytest.mark.framework
@pytest.mark.parametrize("name", ["accumulation", *SLOW])
def test_two_devices_train_as_with_transformers_to_the_bit(name: str, tmp_path: Path) -> None:
    for of_rank in on_two_standins("ddp.differences", name, folder=tmp_path):
        for of_kind in of_rank.values():
            assert of_kind["different"] == []
            assert of_kind["logs"] is None
            assert of_kind["steps"] > 1


def test_a_resume_restores_the_generators_of_both_devices(tmp_path: Path) -> None:
    for of_rank in on_two_standins("ddp.resumed", folder=tmp_path):
        assert of_rank == {"weight_gap": 0.0, "steps": 6, "states": ["rng_state_0.pth", "rng_state_1.pth"]}


@pytest.mark.parametrize("settings", [{}, pytest.param({"fp16": True}, marks=pytest.mark.slow)], ids=str)
def test_a_step_waits_and_exchanges_no_more_than_by_hand(settings: dict[str, bool], tmp_path: Path) -> None:
    for of_rank in on_two_standins("ddp.counted", settings, folder=tmp_path):
        ours = of_rank["ours"]
        hand = of_rank["hand"]
        assert ours["waits"] <= hand["waits"]
        assert ours["pageable"] == 0
        assert ours["collectives"] == hand["collectives"]
