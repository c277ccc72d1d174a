"""Other libraries on Trainwright: the same trainings under transformers and under `install()`.

Each side is one process that runs every case; nothing of those libraries is changed but by `install()`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SIDE = Path(__file__).with_name("side.py")
CASES = (
    "trl_sft",
    "trl_sft_packing",
    "trl_sft_completion_only",
    "trl_sft_peft",
    "trl_sft_resumed",
    "trl_dpo",
    "trl_reward",
    "trl_kto",
    "trl_grpo",
    "sentence_transformers_two_datasets",
    "cross_encoder",
    "setfit_few_shots",
    "peft_lora_with_the_plain_trainer",
)
# transformers weighs a batch's loss by its samples, and this package by the labels that count (docs: evaluation).
TOKENS_ARE_WEIGHED = {name for name in CASES if name.startswith("trl_sft")}


def start(side: str, out: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    env.pop("WORLD_SIZE", None)
    command = [sys.executable, str(SIDE), side, str(out), *CASES]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sides")
    running = {side: start(side, folder / f"{side}.json") for side in ("ours", "theirs")}
    for side, process in running.items():
        _, errors = process.communicate(timeout=900)
        assert process.returncode == 0, f"{side}: {errors[-3000:]}"
    return {side: json.loads((folder / f"{side}.json").read_text()) for side in running}


@pytest.mark.slow
def test_the_sides_differ_only_in_the_trainer(sides: dict[str, dict[str, Any]]) -> None:
    assert sides["ours"]["base"] == "trainwright.trainer.Trainer"
    assert sides["theirs"]["base"] == "transformers.trainer.Trainer"
    assert sides["ours"]["versions"] == sides["theirs"]["versions"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_training(case: str, sides: dict[str, dict[str, Any]]) -> None:
    ours, theirs = sides["ours"][case], sides["theirs"][case]
    assert "error" not in theirs, theirs["error"]
    assert "error" not in ours, ours["error"]
    for what in theirs.keys() - {"logs"}:  # weights, files, and what a case adds
        assert ours[what] == theirs[what], what
    assert len(ours["logs"]) == len(theirs["logs"])
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if name.endswith("loss") and name.startswith("eval"):
                rough = case in TOKENS_ARE_WEIGHED
                assert mine[name] == pytest.approx(value, rel=0.01 if rough else 1e-6), name
            else:
                assert mine[name] == value, name
