"""The note about steps that wait for an accelerator: when it is there, and what it says to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainwright import TrainingArguments
from trainwright.capabilities.guard.checks import look_at_waits
from trainwright.optim.adamw_bf16 import AdamWBF16


def found(device: str = "cuda", *, optimizer: Any = None, **settings: Any) -> list[Any]:
    args = TrainingArguments("unused", use_cpu=True, report_to="none", **settings)
    facts = SimpleNamespace(args=args, device=torch.device(device), optimizer=optimizer or adamw())
    return list(look_at_waits(facts))


def adamw(**settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(2, requires_grad=True)], **settings)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({}, "on_nonfinite='skip' reads the norm of the gradients, since AdamW is not fused"),
        ({"on_nonfinite": "warn"}, "on_nonfinite='warn' reads the norm of the gradients, since AdamW is not fused"),
        ({"on_spike": "skip"}, "on_spike='skip' reads loss and norm"),
        ({"on_nonfinite": "rollback"}, "on_nonfinite='rollback' reads the norm of the gradients"),
    ],
    ids=str,
)
def test_a_step_that_waits_is_said_with_its_cause(settings: dict[str, Any], cause: str) -> None:
    (finding,) = found(**settings)
    assert finding.severity == "note"
    assert finding.evidence.startswith(cause)
    assert "waits once" in finding.evidence


@pytest.mark.parametrize("settings", [{}, {"on_nonfinite": "warn"}], ids=str)
def test_what_it_says_to_change_ends_the_wait(settings: dict[str, Any]) -> None:
    (finding,) = found(**settings)
    assert "adamw_torch_fused" in finding.cure
    assert "on_nonfinite='ignore'" in finding.cure
    assert found(optimizer=adamw(fused=True), **settings) == []
    assert found(on_nonfinite="ignore") == []


def test_the_scaler_of_fp16_waits_although_the_guard_need_not() -> None:
    ours = AdamWBF16([torch.zeros(2, requires_grad=True)])
    assert found(optimizer=ours) == []
    (finding,) = found(optimizer=ours, fp16=True)
    assert finding.evidence.startswith("The loss scale of fp16 and AdamWBF16, which is not fused")


def test_nothing_is_said_on_a_cpu_and_a_fused_optimizer_cannot_help_on_a_device_without_it() -> None:
    assert found("cpu") == []
    assert len(found("mps", optimizer=adamw(fused=True))) == 1
