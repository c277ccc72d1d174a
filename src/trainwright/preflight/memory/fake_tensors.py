"""Stand-ins for a model and its batches: shapes and types without memory, on which a step runs and computes nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def make_fake_mode() -> FakeTensorMode:
    """Inside of it every operation gives a tensor of the right shape and no value."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model whose parameters and buffers take no memory."""
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        memo[id(tensor)] = mode.from_tensor(tensor)
    with mode:
        return copy.deepcopy(model, memo)


def fake_batch(batch: Mapping[str, object], mode: FakeTensorMode) -> dict[str, Any]:
    return {name: _without_values(value, mode) for name, value in batch.items()}


def _without_values(value: object, mode: FakeTensorMode) -> Any:
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, Mapping):
        return {name: _without_values(inner, mode) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without_values(inner, mode) for inner in value)
    return value
