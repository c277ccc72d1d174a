"""Random states of several GPUs in one process; torch's functions for them are stood in for, as no two are here."""

from __future__ import annotations

import pytest
import torch

from trainwright.checkpoint import rng


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    states = [7, 8, 9]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
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
