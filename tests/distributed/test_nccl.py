"""The same runs on GPUs, over nccl: whole models and models in parts. `on_gpus.sh` beside this file runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from .._support.two_processes import Done, run
from . import layouts
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


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_gpus_train_as_one_cpu_does(case: str, done: Done, tmp_path: Path) -> None:
    alone = outcome(trainer_of("means, accumulated", tmp_path, 1))
    expected = [entry["loss"] for entry in alone["log"] if "loss" in entry]
    for told in done.told:
        whole, resumed, device = told[case]
        assert device == "cuda"
        assert whole == pytest.approx(expected, rel=1e-3)
        assert resumed == pytest.approx(whole, rel=1e-5)


# Several of them in one process, and layers that two of them share.


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_one_process_uses_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    alone = outcome(trainer_of("counted, accumulated", tmp_path / "cpu", 1))
    trainer = trainer_of("counted, accumulated", tmp_path / "gpus", GPUS, use_cpu=False)
    losses, expected = ([entry["loss"] for entry in one["log"] if "loss" in entry] for one in (outcome(trainer), alone))
    assert isinstance(trainer.model_wrapped, torch.nn.DataParallel)
    assert trainer.args.n_gpu == GPUS
    assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.process
@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_two_share_the_layers(tmp_path: Path) -> None:
    layouts.write_model(tmp_path / layouts.MODEL)
    alone = layouts.outcome_of_parts(layouts.trainer_of(layouts.whole(tmp_path / layouts.MODEL), tmp_path / "cpu"))
    script = """
    import sys
    from pathlib import Path
    from tests._support.two_processes import tell
    from tests.distributed.layouts import MODEL, in_parts, trainer_of

    folder = Path(sys.argv[1])
    trainer = trainer_of(in_parts(folder / MODEL, tp_size=2), folder / "gpus", use_cpu=False)
    trainer.train()
    tell(losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    """
    done = run(script, str(tmp_path), folder=tmp_path, timeout_s=300)
    expected = [entry["loss"] for entry in alone["log"] if "loss" in entry]
    for told in done.told:
        assert told["losses"] == pytest.approx(expected, rel=1e-3)
