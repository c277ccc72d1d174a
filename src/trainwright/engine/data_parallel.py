"""DataParallel: several GPUs in one process, to each of which torch copies the model for every forward pass.

A batch is split over the devices, and their losses are reduced to the loss that a single device would have: a sum if
each part was divided by the items of the whole window, otherwise a mean weighted by the samples of each part.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any  # inputs and outputs of a user's model

import torch
from torch import nn

from trainwright._types import Optimizer, output_loss
from trainwright.config.plans import EnginePlan
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT, Engine, MakeOptimizer
from trainwright.engine.precision import DTYPES, as_fp32
from trainwright.support import model_facts
from trainwright.support.model_facts import uncompiled
from trainwright.support.tensor_tree import find_batch_size

logger = logging.getLogger(__name__)

COUNT = "num_items_in_batch"


class DataParallelEngine(Engine):
    """Trains on several devices from one process. No fp8, because its layers cannot be copied."""

    def __init__(self, plan: EnginePlan) -> None:
        if plan.precision.mixed == "fp8":
            logger.warning(
                "fp8 has no effect with DataParallel, which copies the layers to %d GPUs of one process: they compute "
                "in the type of the weights. Start one process for each: torchrun --nproc-per-node ..., or accelerate "
                "launch.",
                plan.num_devices,
            )
        super().__init__(plan, make_accelerator(plan), torch.device(plan.device))
        self._copies: ReplicatedModel | None = None

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        return self.setup_for_evaluation(model), make_optimizer(model)

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        """Wraps a model. With quantized weights, which cannot be copied, it stays on one device."""
        if any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
            return model
        if self._copies is None or self._copies.module is not model:
            self._copies = ReplicatedModel(model, self.device, DTYPES.get(self._plan.precision.mixed))
        return self._copies

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return NO_CONTEXT  # autocast is around the copies, which share the forward method of the model

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = uncompiled(model)
        return inner.module if isinstance(inner, nn.DataParallel) else inner

    @property
    def changes_layers(self) -> str | None:
        return "DataParallel copies the layers to each GPU"

    @property
    def num_batch_parts(self) -> int:
        return self._plan.num_devices if self._copies is not None else 1

    def note_mean_losses(self) -> None:
        """Averages the losses of the devices from now on, which are added up if each was divided by the items."""
        if self._copies is not None:
            self._copies.divides_by_items = False

    def peak_flops(self) -> float | None:
        peak = super().peak_flops()
        return None if peak is None else peak * self._plan.num_devices


class ReplicatedModel(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel for a model that returns its own loss, and may take a number of items; under autocast to `dtype`."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__(model)
        self._device = device
        self._dtype = dtype
        self.divides_by_items = not model_facts.ignores_item_count(model)
        self._aux_coefficient = model_facts.auxiliary_coefficient(model)
        self._is_divided = False
        self._sizes: list[int] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._dtype is None:
            return super().forward(*inputs, **kwargs)
        with torch.autocast(device_type=self._device.type, dtype=self._dtype):
            outputs = super().forward(*inputs, **kwargs)
        return as_fp32(outputs)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Splits inputs over the devices; a scalar tensor goes to each of them."""
        single = {name: value for name, value in kwargs.items() if _is_single(value)}
        others = {name: value for name, value in kwargs.items() if name not in single}
        inputs, parts = super().scatter(inputs, others, device_ids)
        self._is_divided = self.divides_by_items and kwargs.get(COUNT) is not None
        self._sizes = [find_batch_size(given) or 1 for given in zip(inputs, parts, strict=True)]
        for part, device in zip(parts, device_ids, strict=False):
            part.update({name: value.to(device) for name, value in single.items()})
        return inputs, parts

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Joins the outputs of the devices as the outputs of one batch."""
        first = outputs[0]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Was asked to gather along dimension 0, but all input tensors were scala")
            whole = super().gather(outputs, output_device)
        if isinstance(first, Mapping):
            for name in [name for name, value in first.items() if _is_single(value)]:
                whole[name] = self._loss(whole) if name == "loss" else self._mean(whole[name])
        elif isinstance(first, tuple) and _is_single(first[0]):
            whole = type(whole)((self._loss(whole), *whole[1:]))
        return whole

    def _loss(self, outputs: Any) -> torch.Tensor:
        losses: torch.Tensor = output_loss(outputs)
        if not self._is_divided:
            return self._mean(losses)
        auxiliary = outputs.get("aux_loss") if self._aux_coefficient and isinstance(outputs, Mapping) else None
        if auxiliary is None:
            return losses.sum()
        own: torch.Tensor = (losses - self._aux_coefficient * auxiliary).sum()
        return own + self._aux_coefficient * self._mean(auxiliary)

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        if values.ndim == 0:
            return values
        sizes = torch.tensor(self._sizes[: len(values)], dtype=values.dtype, device=values.device)
        mean: torch.Tensor = torch.dot(values, sizes) / sizes.sum()
        return mean


def _is_single(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0
