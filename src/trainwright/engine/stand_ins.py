"""StandInEngine: whole models in several processes, for a plan of memory whose tensors have none.

Torch's DistributedDataParallel reads the memory of parameters when it is made. This engine has its buffers and calls
its collectives, at the same moments, and nothing else: gradients are flattened into buckets that stay for the whole
run.
Source: torch's notes on DistributedDataParallel, "Internal Design".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from trainwright._types import Optimizer
from trainwright.config.plans import EnginePlan
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import Count, MakeOptimizer
from trainwright.engine.distributed_base import DistributedEngine, finds_unused_parameters

MIB = 2**20
FIRST_BUCKET = 1  # MiB, if no size is set: the first all-reduce begins early
BUCKET = 25  # MiB, torch's default


class StandInEngine(DistributedEngine):
    """Holds the buffers of DDP, and makes the same exchanges."""

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan, make_accelerator(plan))
        self._buckets: list[torch.Tensor] = []
        self._used: torch.Tensor | None = None  # which parameters a backward pass reached

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        finds_unused = finds_unused_parameters(self._plan.ddp, model)
        # Without unused parameters the buckets are made again after the first pass, in the order of the gradients.
        order = trained if finds_unused and not self._plan.ddp.static_graph else trained[::-1]
        self._buckets = [make_flat(group) for group in in_buckets(order, self._plan.ddp.bucket_cap_mb)]
        self._used = trained[0].new_empty(len(trained), dtype=torch.int32) if trained and finds_unused else None
        buffers = list(model.buffers())
        if buffers and self._plan.ddp.broadcast_buffers is not False and trained:
            model.register_forward_pre_hook(lambda module, inputs: self._send(buffers))
        return model, make_optimizer(model)

    def backward(self, loss: torch.Tensor, *, gradient: torch.Tensor | None = None) -> None:
        super().backward(loss, gradient=gradient)
        if not (self.accelerator.gradient_state.sync_gradients or self._plan.ddp.sync_each_batch):
            return
        if self._used is not None:
            dist.all_reduce(self._used)
        for bucket in self._buckets:
            dist.all_reduce(bucket)

    def show_buffers(self, count: Count) -> None:
        count(self._buckets if self._used is None else [*self._buckets, self._used], "communication")

    def _send(self, buffers: list[torch.Tensor]) -> None:
        """Sends the buffers of the first process, each type together, before the first pass of a window."""
        if self.accelerator.gradient_state.sync_gradients:
            for dtype in {buffer.dtype for buffer in buffers}:
                dist.broadcast(make_flat([buffer for buffer in buffers if buffer.dtype == dtype]), src=0)


def in_buckets(parameters: Iterable[nn.Parameter], cap_mb: int | None) -> Iterator[list[nn.Parameter]]:
    """Yields the parameters of each bucket: parameters of a type come together, until a bucket has its size.

    Args:
        parameters: in the order in which they are put into buckets.
        cap_mb: MiB of a bucket; None: torch's sizes, 1 for the first and 25 for the others.
    """
    filled: dict[torch.dtype, list[nn.Parameter]] = {}
    sizes: dict[torch.dtype, int] = {}
    caps: dict[torch.dtype, int] = {}
    for parameter in parameters:
        kind = parameter.dtype
        filled.setdefault(kind, []).append(parameter)
        sizes[kind] = sizes.get(kind, 0) + parameter.numel() * parameter.element_size()
        cap = caps.get(kind, FIRST_BUCKET if cap_mb is None else cap_mb)
        if sizes[kind] >= cap * MIB:
            yield filled.pop(kind)
            sizes[kind] = 0
            caps[kind] = BUCKET if cap_mb is None else cap_mb
    yield from filled.values()


def make_flat(tensors: list[torch.Tensor] | list[nn.Parameter]) -> torch.Tensor:
    """Returns a flat tensor with room for others of one type."""
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), requires_grad=False)
