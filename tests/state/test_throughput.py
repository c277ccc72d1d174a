"""How fast a phase went."""

from __future__ import annotations

import time

import pytest
import transformers

from trainwright import speed_metrics
from trainwright.state.throughput import step_logs


@pytest.mark.parametrize("counts", [{}, {"num_samples": 10}, {"num_samples": 10, "num_steps": 3, "num_tokens": 999}])
def test_the_rates_of_transformers(counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 103.25)
    assert speed_metrics("eval", 100.0, **counts) == transformers.trainer_utils.speed_metrics("eval", 100.0, **counts)


def test_no_time_at_all_is_no_division_by_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert speed_metrics("train", 100.0, num_samples=5) == {"train_runtime": 0.0}


def test_what_is_logged_of_a_step() -> None:
    import torch

    assert step_logs(0.5, torch.tensor(2.0), 0.1, 0) == {"loss": 0.5, "grad_norm": 2.0, "learning_rate": 0.1}
    assert step_logs(0.5, None, 0.1, 3) == {"loss": 0.5, "learning_rate": 0.1, "num_non_finite_losses": 3}
    assert step_logs(0.5, 1.5, 0.1, 0)["grad_norm"] == 1.5
