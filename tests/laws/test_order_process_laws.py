"""Whatever was called before, `train()` ends with the same weights in several processes too, to the bit."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .._support.two_processes import run
from .order_runs import BEFORE, KINDS

SCRIPT = Path(__file__).with_name("order_runs.py")
# An engine, for which `make test` has one launch; the others take minutes.
FIRST = ["fsdp, whole after forward"]
# Kinds in one launch: those of DeepSpeed have a state of their own in the process.
LAUNCHES = [
    FIRST,
    ["ddp", "fsdp", "fsdp, small units", "fsdp, recomputed", "fsdp, sharded files"],
    ["fsdp, bf16", "fsdp, tied", "fsdp, one row", "fsdp, adapter", "fsdp, compiled"],
    ["fsdp, accumulating", "fsdp, own optimizer", "parts", "tp", "cp", "cp + fsdp"],
    ["zero 1", "zero 3"],
]
pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]


def test_every_kind_is_launched() -> None:
    assert sorted(kind for kinds in LAUNCHES for kind in kinds) == sorted(KINDS)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    @functools.cache
    def launched(number: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("orders")
        environment = {"DS_ACCELERATOR": "cpu"}
        done = run(SCRIPT, *LAUNCHES[number], folder=folder, timeout_s=450, environment=environment)
        return done.told[0]

    return lambda kind: launched(next(i for i, kinds in enumerate(LAUNCHES) if kind in kinds))[kind]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FIRST else pytest.mark.slow) for kind in KINDS]
)
def test_a_call_before_training_changes_nothing(kind: str, told: Callable[[str], dict[str, Any]]) -> None:
    if kind.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    found = told(kind)
    assert found.pop("trained") > 0.001
    assert found == dict.fromkeys([*BEFORE, "twice"], 0.0)
