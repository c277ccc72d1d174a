"""Engines of processes that share sequences where DeepSpeed shares out the model, and their stand-ins for a plan.

ZeRO partitions the model over all processes and averages gradients over all of them, as DDP does, so it treats parts of
a sequence as batches. The exchange of keys or heads is our own, not DeepSpeed's `UlyssesSPAttentionHF`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainwright._types import Prepared
from trainwright.config import deepspeed_config
from trainwright.config.plans import EnginePlan
from trainwright.engine.base import MakeOptimizer, MakeScheduler
from trainwright.engine.deepspeed import DeepSpeedEngine
from trainwright.engine.distributed_base import DistributedEngine
from trainwright.engine.long_context import SharesSequences
from trainwright.engine.zero3_stand_in import ZeroThreeStandIn
from trainwright.engine.zero_stand_ins import ZeroStandIn


def make_long_zero_engine(plan: EnginePlan) -> DistributedEngine:
    """Makes the engine of a plan with DeepSpeed and with `cp` or `sp` above 1."""
    assert plan.deepspeed is not None
    if not plan.stands_in:
        return SequencesWithDeepSpeed(plan)
    is_third = deepspeed_config.get(plan.deepspeed.config, "zero_optimization.stage") == 3
    return SequencesOfZeroThree(plan) if is_third else SequencesOfZero(plan)


class SequencesWithDeepSpeed(SharesSequences, DeepSpeedEngine):
    """Models that DeepSpeed partitions over all processes."""

    def setup(self, model: nn.Module, *, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler) -> Prepared:
        prepared = super().setup(model, make_optimizer=make_optimizer, make_scheduler=make_scheduler)
        self._prepare(self.unwrap(prepared.model))
        return prepared

    @contextmanager
    def _trying(self, model: nn.Module) -> Iterator[None]:
        """Makes stage 3 discard the order of modules that it records in the trial, which has no backward passes.

        DeepSpeed records the order of modules in one pass, and from the next pass on it decides for good which weights
        to free. After the trial alone it would free all of them before each backward pass. It discards the order if a
        pass differs from the recorded one: here by an additional call of the embedding.
        """
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]  # a model of transformers
        token = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        passes = itertools.count()

        def call_embedding(*_inputs: Any) -> None:
            for _ in range(next(passes)):
                embedding(token)

        hook = model.register_forward_pre_hook(call_embedding)
        try:
            yield
        finally:
            hook.remove()

    def _filled_in(self, model: nn.Module) -> dict[str, Any]:
        """Leaves out the sizes of batches: DeepSpeed counts every process as one with its own batch."""
        config = super()._filled_in(model)
        return {name: value for name, value in config.items() if name not in deepspeed_config.OF_SEQUENCES}


class SequencesOfZero(SharesSequences, ZeroStandIn):
    """Stages 1 and 2 without memory, for a plan of it."""


class SequencesOfZeroThree(SharesSequences, ZeroThreeStandIn):
    """Stage 3 without memory, for a plan of it."""
