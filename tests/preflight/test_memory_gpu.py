"""The predicted peak of a step on a GPU against what its allocator counted in a training."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from trainwright.preflight.memory.planner import plan_memory

from .memory_cases import CASES
from .test_memory import CLOSE, trainer_for

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_near_the_gpus_allocator(name: str, tmp_path: Path) -> None:
    warm = trainer_for(tmp_path / "warm", CASES[name], use_cpu=False)
    warm.train()  # libraries take their workspace once
    del warm
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trainer = trainer_for(tmp_path / "run", CASES[name], use_cpu=False)
    predicted = plan_memory(trainer, "1TB").peak
    assert not predicted.is_measured
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    measured = torch.cuda.max_memory_allocated() - before
    if name == "convolutions":  # cuDNN chooses its workspace on the device, here as large as the model
        assert predicted.total_bytes <= measured
    else:
        assert predicted.total_bytes == pytest.approx(measured, rel=CLOSE)


def test_the_budget_of_a_gpu_is_its_memory(tmp_path: Path) -> None:
    plan = trainer_for(tmp_path, CASES["mlp"], use_cpu=False).check(memory=True).memory
    assert plan is not None
    assert plan.device == "cuda"
    assert plan.budget_bytes == torch.cuda.get_device_properties(0).total_memory
