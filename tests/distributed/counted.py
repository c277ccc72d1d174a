"""Collectives of a step, counted where torch dispatches them, of a trainer and of a loop by hand that does the same."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests._support.two_processes import tell
from tests.distributed.cases import OURS
from tests.parity import data, models
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, DistributedSampler

from trainwright import TrainerCallback

FOLDER = sys.argv[1]
SIZE = 4
STEPS = 8
# Steps between which calls are counted: neither begins, logs nor ends the run.
FIRST = 2
LAST = 6
KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # micro-batches, settings
    "ddp": (1, {"ddp_find_unused_parameters": False}),
    "ddp, accumulated": (2, {"ddp_find_unused_parameters": False}),
    "full_shard": (1, {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "Linear"}}),
    "shard_grad_op": (
        1,
        {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": "Linear"}},
    ),
}


class Between:
    """Profiles from the end of one step to the end of another."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self.found: dict[str, float] = {}

    def after(self, step: int) -> None:
        if step == FIRST:
            self._profile.start()
        if step == LAST:
            self._profile.stop()
            names = Counter(event.name for event in self._profile.events() if event.name.startswith("c10d::"))
            self.found = {name: count / (LAST - FIRST) for name, count in sorted(names.items())}


def by_trainer(micro_batches: int, settings: dict[str, Any], after: Callable[[int], None]) -> None:
    class Tells(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            after(state.global_step)

    more = {
        "per_device_train_batch_size": SIZE,
        "gradient_accumulation_steps": micro_batches,
        "max_steps": STEPS,
        "save_strategy": "no",
        "logging_steps": STEPS,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
    }
    parts = {"train_dataset": data.vectors(SIZE * micro_batches * STEPS * 2), "callbacks": [Tells()]}
    OURS.make(models.seeded(lambda: models.ReturnsDict(0.0)), FOLDER, more | settings, **parts).train()


def by_hand(micro_batches: int, kind: str, after: Callable[[int], None]) -> None:
    items = data.vectors(SIZE * micro_batches * STEPS * 2)
    whole = models.seeded(lambda: models.ReturnsDict(0.0))
    model: Any = DistributedDataParallel(whole) if kind.startswith("ddp") else sharded(whole, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(items, batch_size=SIZE, sampler=DistributedSampler(items))
    for number, batch in enumerate(loader, start=1):
        is_last = number % micro_batches == 0
        if isinstance(model, DistributedDataParallel) and not is_last:
            with model.no_sync():
                model(**batch)["loss"].backward()
            continue
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after(number // micro_batches)


def sharded(model: nn.Module, kind: str) -> nn.Module:
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        fully_shard(layer, reshard_after_forward=kind == "full_shard")
    return fully_shard(model)  # type: ignore[return-value]


for kind, (micro_batches, settings) in KINDS.items():
    ours = Between()
    hand = Between()
    by_trainer(micro_batches, settings, ours.after)
    assert dist.is_initialized()
    by_hand(micro_batches, kind, hand.after)
    if os.environ["RANK"] == "0":
        tell(**{kind: [ours.found, hand.found]})
