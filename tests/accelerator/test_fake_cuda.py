"""Parts of a step on fake tensors of CUDA: a part that waited for the device would ask for a value, which raises there.

torch's CPU build has no CUDA behind its fake tensors: indexing, copies, pinned memory, streams and events raise, a
backward pass aborts the process, and autocast and the gradient scaler turn themselves off. So these tests run the parts
after the backward pass and beside the loss; whole steps run on the stand-in (`test_quiet.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from trainwright.capabilities.guard.step_guard import LossMark, read
from trainwright.engine.base import Engine
from trainwright.state.meter import LossMeter
from trainwright.support.loss_normalization import LossOutput, LossRule

from .._support.small import make_trainer

DEVICE = torch.device("cuda")


class Parts:
    """Objects of a run whose tensors are fake ones of CUDA."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = nn.Linear(3, 2, device="meta")
        for name in ("weight", "bias"):
            parameter = nn.Parameter(torch.empty_like(getattr(self.model, name), device=DEVICE))
            parameter.grad = torch.empty_like(parameter)
            setattr(self.model, name, parameter)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.loss = torch.empty((), device=DEVICE)
        self.batch = {"labels": torch.empty(2, 5, dtype=torch.long, device=DEVICE)}
        self.rule = LossRule(counts_items=True)
        self.meter = LossMeter("cpu")
        self.meter.total = torch.zeros((), device=DEVICE)


def count_labels(parts: Parts) -> Any:
    return parts.rule.count([parts.batch, parts.batch])


def weigh_by_items(parts: Parts) -> Any:
    rule = LossRule(counts_items=True, weights_items=True, is_scaled=None)
    return rule.apply(parts.loss, parts.batch, rule.count([parts.batch] * 2), micro_batches=2, share=1.0)


def mean_of_a_micro_batch(parts: Parts) -> Any:
    return parts.rule.compute_mean(parts.loss, parts.batch, count_labels(parts))


def loss_with_items(parts: Parts) -> Any:
    return LossOutput(parts.loss, num_items=(parts.batch["labels"] != -100).sum()).with_items(parts.batch)


def add_losses(parts: Parts) -> Any:
    parts.meter.add(parts.loss)
    parts.meter.end_step()
    parts.meter.add(parts.loss)
    parts.meter.add(parts.loss)
    return parts.meter.sum_step()


def clip(parts: Parts) -> Any:
    return parts.engine.clip(parts.model, 1.0)


def measure(parts: Parts) -> Any:
    return parts.engine.measure_norm(parts.model)


def scale_gradients(parts: Parts) -> None:
    parts.engine.scale_gradients(parts.model, 1 / count_labels(parts).clamp(min=1))


def update(parts: Parts) -> Any:
    return parts.engine.step(parts.optimizer)


def update_with_a_flag(parts: Parts) -> Any:
    norm = clip(parts)
    parts.optimizer.found_inf = torch.ne(norm * 0.0, 0.0).float()  # type: ignore[attr-defined]
    return parts.engine.step(parts.optimizer)


def clear(parts: Parts) -> None:
    clip(parts)
    parts.engine.zero_grad(parts.model)


def mark_loss(parts: Parts) -> Any:
    return LossMark()(parts.loss)


PARTS: tuple[Callable[[Parts], Any], ...] = (
    count_labels,
    weigh_by_items,
    mean_of_a_micro_batch,
    loss_with_items,
    add_losses,
    clip,
    measure,
    scale_gradients,
    update,
    update_with_a_flag,
    clear,
    mark_loss,
)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine: Engine = make_trainer(tmp_path)._trainwright.services.engine
    engine.device = DEVICE
    return engine


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_of_a_step_asks_for_no_value(part: Callable[[Parts], Any], engine: Engine) -> None:
    with FakeTensorMode():
        result = part(Parts(engine))
    if isinstance(result, torch.Tensor):
        assert result.device.type == "cuda"


@pytest.mark.parametrize("wait", [read, bool], ids=["read", "bool"])
def test_a_wait_raises(wait: Callable[[torch.Tensor], Any], engine: Engine) -> None:
    """The host's guard reads the norm, for example."""
    with FakeTensorMode():
        norm = clip(Parts(engine))
        with pytest.raises(DataDependentOutputException):
            wait(norm)
