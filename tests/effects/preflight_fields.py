"""Checks of the field that turns the look at the first step off."""

from __future__ import annotations

import torch

from .bench import Bench, samples
from .table import shows


@shows("preflight")
def the_first_step_is_looked_at(bench: Bench) -> None:
    masked = [{**sample, "labels": torch.tensor(-100)} for sample in samples()]
    bench.train(train_dataset=masked, max_steps=2, max_skipped_steps=0)  # all steps are: an error otherwise
    assert bench.warnings().count("All 2 labels of the first step are -100") == 1
    bench.train(train_dataset=masked, max_steps=2, max_skipped_steps=0, preflight=False)
    assert "labels of the first step" not in bench.warnings()
