"""Checks of the fields that transformers does not have."""

from __future__ import annotations

from typing import Any

import pytest

from .bench import Bench
from .table import shows


def rates(bench: Bench, **settings: Any) -> dict[str, float]:
    """The learning rate of each parameter in a run with a constant one of 0.1."""
    trainer = bench.train(lr_scheduler_type="constant", **settings)
    return {name: trainer.get_optimizer_group(p)["lr"] for name, p in trainer.model.named_parameters()}


@shows("layerwise_lr_decay")
def lower_layers_learn_more_slowly(bench: Bench) -> None:
    found = rates(bench, layerwise_lr_decay=0.5)
    assert (found["head.weight"], found["body.1.weight"], found["body.0.weight"]) == pytest.approx((0.1, 0.05, 0.025))
    assert set(rates(bench).values()) == {0.1}
    assert bench.changes_weights({"layerwise_lr_decay": 0.5})


@shows("lr_groups")
def parameters_learn_at_rates_of_their_own(bench: Bench) -> None:
    found = rates(bench, lr_groups={"head": 0.02, r"body\.0": "0.5x"})
    assert (found["head.weight"], found["body.0.bias"], found["body.1.weight"]) == pytest.approx((0.02, 0.05, 0.1))
    assert rates(bench, lr_groups='{"head": 0.02, "body.0": "0.5x"}') == found
    assert bench.changes_weights({"lr_groups": {"head": 0.02}})
