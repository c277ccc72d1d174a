"""Two devices for torch's DataParallel on a machine without GPUs: what it splits, copies and joins across devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

DEVICES = 2


class Double:
    """Splits inputs and joins outputs as two devices do; remembers the keywords that each device got."""

    def __init__(self) -> None:
        self.parts: list[list[dict[str, Any]]] = []

    def scatter(self, _: Any, inputs: Any, kwargs: dict[str, Any], device_ids: Any) -> Any:
        num_rows = len(next(iter([*kwargs.values(), *inputs])))
        cuts = torch.arange(num_rows).chunk(DEVICES)
        parts = [{name: _rows(value, cut) for name, value in kwargs.items()} for cut in cuts]
        self.parts.append(parts)
        return [tuple(_rows(value, cut) for value in inputs) for cut in cuts], parts

    def gather(self, _: Any, outputs: list[Any], output_device: Any) -> Any:
        first = outputs[0]
        if isinstance(first, dict):
            return {name: self.gather(_, [one[name] for one in outputs], output_device) for name in first}
        if isinstance(first, tuple):
            return tuple(self.gather(_, list(parts), output_device) for parts in zip(*outputs, strict=True))
        return torch.stack(outputs) if first.ndim == 0 else torch.cat(outputs)


def _rows(value: Any, cut: torch.Tensor) -> Any:
    return value[cut] if isinstance(value, torch.Tensor) else value


@contextmanager
def two_devices() -> Iterator[Double]:
    """Within the context DataParallel has two devices, both of them the CPU."""
    double = Double()
    original = nn.DataParallel.__init__

    def with_devices(self: Any, module: nn.Module) -> None:
        original(self, module)
        self.device_ids = ["cpu"] * DEVICES
        self.output_device = "cpu"
        self.dim = 0
        self.src_device_obj = torch.device("cpu")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.DataParallel, "scatter", lambda *a: double.scatter(*a))
        patch.setattr(nn.DataParallel, "gather", lambda *a: double.gather(*a))
        patch.setattr(nn.DataParallel, "replicate", lambda self, module, ids: [module] * len(ids))
        patch.setattr(
            nn.DataParallel,
            "parallel_apply",
            lambda self, copies, inputs, kwargs: [c(*i, **k) for c, i, k in zip(copies, inputs, kwargs, strict=True)],
        )
        patch.setattr(nn.DataParallel, "__init__", with_devices)
        yield double
