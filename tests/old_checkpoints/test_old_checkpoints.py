"""Checkpoints that earlier versions wrote are resumed: `0.1.0/` and later ones hold real ones, of `training.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from . import training

FOLDER = Path(__file__).parent
WRITTEN = sorted(path.parent.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*/manifest.json"))

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13


def test_each_kind_of_data_has_one_of_version_0_1() -> None:
    assert {one for one in WRITTEN if one.startswith("0.1.0/")} == {f"0.1.0/{kind}" for kind in training.KINDS}


@pytest.mark.parametrize("written", WRITTEN)
def test_it_is_resumed_to_the_end(written: str, tmp_path: Path) -> None:
    kind = written.partition("/")[2]
    whole = training.trainer_of(kind, tmp_path / "whole")
    whole.train()
    shutil.copytree(FOLDER / written, tmp_path / f"run/checkpoint-{training.STOPPED_AT}")
    resumed = training.trainer_of(kind, tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == training.STEPS
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (whole, resumed)]
    # Equal on the CPU that wrote it; another kind of CPU rounds differently before the checkpoint than after it.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=1e-4, atol=1e-6)
