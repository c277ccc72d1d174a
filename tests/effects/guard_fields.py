"""Checks of the fields that say what happens with a bad step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainwright.errors import NonFiniteError

from .bench import Bench, samples, weights
from .table import shows


def poisoned(*indices: int) -> list[dict[str, Any]]:
    rows = samples()
    for index in indices:
        rows[index]["x"] = torch.full((4,), torch.nan)
    return rows


@shows("on_nonfinite")
def a_step_that_is_not_finite_is_skipped_by_default(bench: Bench) -> None:
    data = poisoned(5)

    def are_finite(**settings: Any) -> bool:
        trainer = bench.train(train_dataset=data, **settings)
        return all(bool(value.isfinite().all()) for value in weights(trainer.model).values())

    assert are_finite()
    assert not are_finite(on_nonfinite="warn")
    assert not are_finite(on_nonfinite="ignore")
    with pytest.raises(NonFiniteError, match="training stops before the update"):
        bench.train(train_dataset=data, on_nonfinite="stop")
    assert not bench.changes_weights({"on_nonfinite": "ignore"})


@shows("max_skipped_steps")
def too_many_skipped_steps_end_training(bench: Bench) -> None:
    data = poisoned(*range(12))
    bench.train(train_dataset=data)
    with pytest.raises(NonFiniteError, match="2 steps in a row were skipped"):
        bench.train(train_dataset=data, max_skipped_steps=2)
