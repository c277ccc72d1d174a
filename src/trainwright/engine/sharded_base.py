"""Base of the engines whose processes each hold a part of the parameters: gradient synchronization and checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainwright._types import Optimizer, StateDict
from trainwright.config.plans import EnginePlan
from trainwright.engine import sharded_state
from trainwright.engine.base import NO_CONTEXT, uncompiled
from trainwright.engine.distributed_base import DistributedEngine

if TYPE_CHECKING:
    from accelerate import Accelerator


class ShardedEngine(DistributedEngine):
    """Base of engines that train a model whose parameters are sharded over the processes."""

    def __init__(self, plan: EnginePlan, accelerator: Accelerator) -> None:
        super().__init__(plan, accelerator)
        self._sharded: Any = None  # the module with the sharded parameters: nn.Module, and FSDPModule or not
        self._syncs = True

    @abstractmethod
    def _sharded_of(self, model: nn.Module) -> nn.Module | None:
        """Returns the module that holds the shards of a model; None: the model is whole."""

    def place(self, model: nn.Module) -> nn.Module:
        return model  # a device may have room for a shard only: a model is moved when it is sharded, or was before

    def _begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._sharded, self._syncs = model, True
        super()._begin(model, optimizer)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        if sync != self._syncs and not self._plan.ddp.sync_each_batch:
            if isinstance(self._sharded, FSDPModule):
                self._sharded.set_requires_gradient_sync(sync)
            self._syncs = sync
        return NO_CONTEXT

    def refresh(self, model: nn.Module) -> None:
        reshard(self._sharded)
        super().refresh(self._sharded)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def holds_parts(self) -> bool:
        return self._sharded is not None

    def whole_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        sharded = self._sharded_of(model)
        if sharded is None:
            return None
        reshard(sharded)
        return sharded_state.whole_weights(sharded)

    def load_weights(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
        sharded = self._sharded_of(model)
        if sharded is not None:
            reshard(sharded)
        return sharded_state.load_whole_weights(model if sharded is None else sharded, weights)

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        return sharded_state.whole_optimizer_state(self._sharded, optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict) -> None:
        sharded_state.load_whole_optimizer_state(self._sharded, optimizer, state)


def reshard(model: nn.Module) -> None:
    """Frees the whole parameters that an evaluation has left gathered (FSDP 2), since no backward pass follows it."""
    for module in uncompiled(model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()
