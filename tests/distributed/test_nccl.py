"""The same runs on GPUs, over nccl: whole models and models in parts. `on_gpus.sh` beside this file runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from .._support.two_processes import Done, run
from .cases import outcome, trainer_of

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
]
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "full_shard": {"fsdp": True},
    "offloaded": {"fsdp": "full_shard offload"},
    "older": {"fsdp": "full_shard", "fsdp_config": {"version": 1}},
    **({"zero": {"deepspeed": {"zero_optimization": {"stage": 3}}}} if importlib.util.find_spec("deepspeed") else {}),
}

SCRIPT = """
import os
from pathlib import Path
from tests._support.two_processes import tell
from tests.distributed.cases import trainer_of
from tests.distributed.test_nccl import CASES

world = int(os.environ["WORLD_SIZE"])
for name, settings in CASES.items():
    trainer = trainer_of("means, accumulated", Path(name), world, use_cpu=False, save_strategy="epoch", **settings)
    trainer.train()
    again = trainer_of("means, accumulated", Path("again"), world, use_cpu=False, **settings)
    resumed = again.train(resume_from_checkpoint=f"{name}/checkpoint-2")
    logs = [[e["loss"] for e in one.state.log_history if "loss" in e] for one in (trainer, again)]
    tell(**{name: [*logs, trainer.accelerator.device.type]})
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("gpus")
    return run(SCRIPT, folder=folder, processes=min(GPUS, 2), timeout_s=500)


@pytest.mark.parametrize("case", CASES)
def test_gpus_train_as_one_cpu_does(case: str, done: Done, tmp_path: Path) -> None:
    alone = outcome(trainer_of("means, accumulated", tmp_path, 1))
    expected = [entry["loss"] for entry in alone["log"] if "loss" in entry]
    for told in done.told:
        whole, resumed, device = told[case]
        assert device == "cuda"
        assert whole == pytest.approx(expected, rel=1e-3)
        assert resumed == pytest.approx(whole, rel=1e-5)
