"""Learning-rate schedules. They are transformers', which stay as they are; this file is the one that imports them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


def make_schedule(
    name: str, optimizer: Optimizer, *, num_warmup_steps: int, num_training_steps: int, options: Any = None
) -> LRScheduler:
    """The schedule `name` over `num_training_steps` optimizer steps, the first `num_warmup_steps` rising from 0."""
    from transformers.optimization import get_scheduler

    return get_scheduler(  # type: ignore[no-any-return]
        str(getattr(name, "value", name)),
        optimizer=optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        scheduler_specific_kwargs=options,
    )


def follows_metrics(scheduler: Any) -> bool:
    """Whether a schedule is driven by evaluation results, `step(metric)`, and not by optimizer steps."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


def current_rate(scheduler: Any, optimizer: Any) -> float:
    """The learning rate of the first parameter group."""
    rate = optimizer.param_groups[0]["lr"] if follows_metrics(scheduler) else scheduler.get_last_lr()[0]
    return rate.item() if isinstance(rate, torch.Tensor) else rate


def __getattr__(name: str) -> Any:
    if name in ("Adafactor", "AdafactorSchedule", "GreedyLR", "get_scheduler"):
        import transformers.optimization

        return getattr(transformers.optimization, name)
    raise AttributeError(name)
