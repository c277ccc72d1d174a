"""Bytes of a model: memory that several tensors share counts once, also where there is none yet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.checkpoint.async_writer import weights_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_count_once_and_others_each(device: str) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.Linear(4, 3)).to(device)
    model[1].weight = model[0].weight  # type: ignore[assignment]
    assert weights_bytes(model) == 4 * (10 * 4 + 4 * 3 + 3)


def test_two_parameters_that_are_views_of_one_memory_count_once() -> None:
    model = nn.Module()
    memory = torch.zeros(8)
    model.one = nn.Parameter(memory[:8])
    model.same = nn.Parameter(memory.view(2, 4))
    assert weights_bytes(model) == 4 * 8
