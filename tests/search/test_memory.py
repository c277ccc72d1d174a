"""A search leaks nothing: trials of a large model leave no more memory behind than the first ones did."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import TrainerCallback

from .small import rates, searcher

MB = 1024 * 1024


class Large(nn.Module):
    """50 MB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 1_500_000)
        self.deep = nn.Linear(1_500_000, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.deep(self.wide(x))
        return {"loss": nn.functional.cross_entropy(logits, labels.clamp(max=1)), "logits": logits}  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_trials_of_50_mb_grow_memory_by_20_mb(tmp_path: Path) -> None:
    seen = []

    class Notes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gc.collect()
            tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
            storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
            seen.append(sum(storages.values()) / MB)

    trainer = searcher(tmp_path, model_init=Large, callbacks=[Notes], max_steps=2)
    assert sum(p.numel() * p.element_size() for p in trainer.model.parameters()) > 50 * MB
    trainer.hyperparameter_search(rates, n_trials=11)
    assert len(seen) == 11
    assert max(seen[1:]) - seen[0] <= 20, seen
