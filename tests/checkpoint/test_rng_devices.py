"""Random states of several GPUs in one process; torch's functions for them are stood in for, as no two are here."""

from __future__ import annotations

import types

import pytest
import torch

from trainwright.checkpoint import rng
from trainwright.distributed import device


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    states = [7, 8, 9]
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[0])
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda one: states.__setitem__(0, one))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda all_: states.__setitem__(slice(0, len(all_)), all_))
    return states


def test_one_process_keeps_those_of_all_its_devices(states: list[int]) -> None:
    kept = rng.capture()
    assert kept["cuda"] == [7, 8, 9]
    states[:] = [1, 2, 3]
    rng.restore(kept)
    assert states == [7, 8, 9]


def test_fewer_devices_take_what_they_can(states: list[int]) -> None:
    kept = rng.capture()
    states[:] = [1, 2]
    rng.restore(kept)
    assert states == [7, 8]


def test_one_of_several_processes_keeps_its_own(states: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert rng.capture()["cuda"] == 7


@pytest.mark.parametrize("is_in_submodule", [False, True])
def test_other_kinds_have_their_entry(is_in_submodule: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of some backends have the functions in a submodule `random` alone."""
    states = [torch.tensor([1, 2], dtype=torch.uint8)]
    functions = types.SimpleNamespace(
        get_rng_state=lambda: states[0], set_rng_state=lambda one: states.__setitem__(0, one)
    )
    module = types.SimpleNamespace(random=functions) if is_in_submodule else functions
    monkeypatch.setattr(device, "accelerator", lambda: "npu")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    kept = rng.capture()
    assert kept["npu"] is states[0]
    states[0] = torch.zeros(2, dtype=torch.uint8)
    rng.restore(kept)
    assert states[0] is kept["npu"]


def test_states_of_missing_devices_are_left_out() -> None:
    kept = rng.capture()
    rng.restore({**kept, "cuda": torch.zeros(16, dtype=torch.uint8), "mlu": [torch.zeros(16, dtype=torch.uint8)]})
    assert rng.same(rng.capture(), kept)
