"""The predicted peak of a step against what the allocator counted in a training; the changes that make it fit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainwright.errors import ArgumentError
from trainwright.preflight.memory.allocation_tracker import find_block
from trainwright.preflight.memory.memory_plan import MemoryPlan, PeakMemory, SettingsChange, parse_size
from trainwright.preflight.memory.planner import plan_memory

from .._support.small import data, differing, make_trainer, weights
from .memory_cases import CASES, Case, LooksAtValues, mlp, vectors

pytestmark = pytest.mark.costly

CLOSE = 0.1


def trainer_for(folder: Path, case: Case, **settings: Any) -> Any:
    torch.manual_seed(0)
    chosen = {"per_device_train_batch_size": 8, "max_steps": 2, "logging_steps": 2, **case.settings, **settings}
    return make_trainer(folder, model=case.model(), train_dataset=case.data(), preflight=False, **chosen)


def peak_of_training(trainer: Any) -> int:
    """Bytes at the peak of a training on the CPU, as the allocator counts them: the weights, and what came after."""
    tensors = {id(t): t for t in (*trainer.model.parameters(), *trainer.model.buffers())}.values()
    there = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    gc.collect()  # what earlier tests left would be freed, and counted, in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        trainer.train()
    now = highest = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)
    return there + highest


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_near_the_allocators(name: str, tmp_path: Path) -> None:
    predicted = plan_memory(trainer_for(tmp_path / "plan", CASES[name]), "1TB").peak
    measured = peak_of_training(trainer_for(tmp_path / "run", CASES[name]))
    assert not predicted.is_measured
    assert predicted.total_bytes == pytest.approx(measured, rel=CLOSE)
    assert sum(predicted.by_kind.values()) == predicted.total_bytes


def test_a_model_that_looks_at_values_is_measured_instead(tmp_path: Path) -> None:
    case = Case(lambda: mlp(LooksAtValues), vectors, {"per_device_train_batch_size": 128})
    peak = plan_memory(trainer_for(tmp_path / "plan", case), "1TB").peak
    assert peak.is_measured
    assert peak.total_bytes == pytest.approx(peak_of_training(trainer_for(tmp_path / "run", case)), rel=CLOSE)


def test_kinds_and_modules_are_distinguished(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, CASES["llama-accumulated"])
    peak = plan_memory(trainer, "1TB").peak
    size = sum(p.numel() * 4 for p in trainer.model.parameters())
    assert peak.by_kind["weights"] == peak.by_kind["gradients"] == size
    assert peak.by_kind["optimizer"] == pytest.approx(2 * size, rel=0.01)
    layers = [peak.by_module[f"model.layers.{i}"] for i in range(2)]
    assert layers[0] == layers[1] > 0
    assert sum(peak.by_module.values()) == peak.by_kind["activations"]


def test_the_cheapest_change_that_fits_is_named_and_does_fit(tmp_path: Path) -> None:
    whole = plan_memory(trainer_for(tmp_path / "whole", CASES["llama"]), "1TB")
    assert whole.fits
    assert whole.changes == ()
    budget = int(whole.peak.total_bytes * 0.6)
    plan = trainer_for(tmp_path / "plan", CASES["llama"]).check(budget=budget).memory
    assert plan is not None
    assert plan.fits is False
    change = plan.cheapest
    assert change is not None
    assert change is plan.changes[-1]  # what costs more is not looked at
    measured = peak_of_training(trainer_for(tmp_path / "run", CASES["llama"], **change.settings))
    assert measured == pytest.approx(change.peak_bytes, rel=CLOSE)
    assert measured < budget * (1 + CLOSE)
    assert f"the cheapest change that fits is {change}" in "\n".join(plan.lines())


def test_the_trainer_is_as_it_was(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path / "planned", CASES["mlp"])
    before = weights(trainer.model)
    names = dict(vars(trainer))
    assert trainer.check(memory=True).memory is not None
    assert differing(weights(trainer.model), before) == {}
    assert all(vars(trainer)[name] is value for name, value in names.items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    trainer.train()
    other = trainer_for(tmp_path / "other", CASES["mlp"])
    other.train()
    assert differing(weights(trainer.model), weights(other.model)) == {}


def test_without_data_there_is_no_plan(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=None)
    with pytest.raises(ArgumentError, match="train_dataset"):
        plan_memory(trainer, None)


@pytest.mark.parametrize(
    ("text", "size"), [(None, None), (12, 12), ("24GB", 24_000_000_000), ("1.5 GiB", 1_610_612_736), ("7", 7)]
)
def test_a_budget_is_a_size(text: Any, size: int | None) -> None:
    assert parse_size(text) == size


def test_an_invalid_budget_is_refused() -> None:
    with pytest.raises(ArgumentError, match="24GB"):
        parse_size("much")


def test_a_plan_with_no_change_that_fits_says_so() -> None:
    change = SettingsChange(settings={"bf16": True}, price="rounded", peak_bytes=90)
    plan = MemoryPlan(peak=PeakMemory(total_bytes=100, by_kind={"weights": 100}), changes=(change,), budget_bytes=50)
    assert plan.cheapest is None
    assert "nor with any of these" in "\n".join(plan.lines())


@pytest.mark.parametrize(
    ("module", "block"),
    [("model.layers.3.mlp.up", "model.layers.3"), ("bert.pooler.dense", "bert.pooler"), ("head", "head"), ("", "")],
)
def test_a_module_is_shown_by_its_block(module: str, block: str) -> None:
    assert find_block(module) == block


def test_a_stream_can_be_planned_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=data.Stream(data.vectors(26)), max_steps=3)
    assert plan_memory(trainer, "1TB").peak.total_bytes > 0
