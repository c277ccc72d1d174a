"""Learning-rate schedules: the most frequent ones, and all others from transformers.

The frequent ones give what transformers' give, bit for bit. They are written again because transformers' file of
schedules loads PEFT, bitsandbytes and what these load: seconds and 60 MB before the first step of a run that uses none.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from trainwright.errors import ArgumentError, did_you_mean

logger = logging.getLogger(__name__)

# Name -> what makes it: a function of transformers.optimization, or a class whose parameters are its settings.
BUILDERS: dict[str, str] = {
    "linear": "get_linear_schedule_with_warmup",
    "cosine": "get_cosine_schedule_with_warmup",
    "cosine_with_restarts": "get_cosine_with_hard_restarts_schedule_with_warmup",
    "polynomial": "get_polynomial_decay_schedule_with_warmup",
    "constant": "get_constant_schedule",
    "constant_with_warmup": "get_constant_schedule_with_warmup",
    "inverse_sqrt": "get_inverse_sqrt_schedule",
    "reduce_lr_on_plateau": "get_reduce_on_plateau_schedule",
    "cosine_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup",
    "cosine_warmup_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    "warmup_stable_decay": "get_wsd_schedule",
    "greedy": "get_greedy_schedule",
}
FROM_THE_RUN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "verbose")
# One of these must be there.
NEEDS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
WITHOUT_OPTIONS = ("constant", "constant_with_warmup")  # transformers ignores them
REEXPORTED = ("Adafactor", "AdafactorSchedule", "GreedyLR", "get_scheduler", *BUILDERS.values())


def make_schedule(
    name: str,
    optimizer: Optimizer,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    options: Mapping[str, object] | None = None,
) -> LRScheduler:
    """Makes the schedule that `lr_scheduler_type` names, with a warm-up from 0; `options` are `lr_scheduler_kwargs`."""
    name = str(getattr(name, "value", name))
    options = dict(options or {})
    steps = {"num_warmup_steps": num_warmup_steps, "num_training_steps": num_training_steps}
    if name in FACTORS and not options:
        return LambdaLR(optimizer, partial(FACTORS[name], **steps))
    from transformers.optimization import get_scheduler

    _check_options(name, options)
    return get_scheduler(  # type: ignore[no-any-return]
        name, optimizer=optimizer, **steps, scheduler_specific_kwargs=options
    )


def schedule_options(name: str) -> tuple[str, ...]:
    """Returns the names that `lr_scheduler_kwargs` may hold for a schedule."""
    import transformers.optimization

    made_by: Callable[..., object] = getattr(transformers.optimization, BUILDERS[name])
    if name == "reduce_lr_on_plateau":
        made_by = ReduceLROnPlateau
    elif name == "greedy":
        made_by = transformers.optimization.GreedyLR
    parameters = inspect.signature(made_by).parameters
    return tuple(parameter for parameter in parameters if parameter not in FROM_THE_RUN)


def _check_options(name: str, options: Mapping[str, object]) -> None:
    known = schedule_options(name)
    for option in options:
        if option not in known:
            guess = did_you_mean(option, known, quoted=True)
            message = (
                f"lr_scheduler_kwargs names {option!r}, which lr_scheduler_type={name!r} does not take; it takes "
                f"{', '.join(known) or 'none'}.{guess}"
            )
            if name not in WITHOUT_OPTIONS:
                raise ArgumentError(message)
            logger.warning("%s It has no effect.", message)
    needed = NEEDS.get(name, ())
    if needed and not any(options.get(option) is not None for option in needed):
        raise ArgumentError(
            f"lr_scheduler_type={name!r} needs lr_scheduler_kwargs={{{needed[0]!r}: ...}}"
            f"{f' (or {needed[1]!r})' if needed[1:] else ''}."
        )


def follows_metrics(scheduler: object) -> bool:
    """Returns True if a schedule is driven by evaluation results, `step(metric)`, and not by optimizer steps."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


def current_rate(scheduler: LRScheduler, optimizer: Optimizer) -> float:
    """Returns the learning rate of the first parameter group."""
    rate = optimizer.param_groups[0]["lr"] if follows_metrics(scheduler) else scheduler.get_last_lr()[0]
    return rate.item() if isinstance(rate, torch.Tensor) else rate


def __getattr__(name: str) -> Any:  # a class or a function of transformers
    if name in REEXPORTED:
        import transformers.optimization

        return getattr(transformers.optimization, name)
    raise AttributeError(name)


def rising(step: int, num_warmup_steps: int) -> float:
    """Returns the factor of the warm-up, from 0 to 1."""
    return step / max(1, num_warmup_steps)


def flat(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return 1.0


def constant(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return rising(step, num_warmup_steps) if step < num_warmup_steps else 1.0


def linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Returns a factor that falls linearly to 0 at the last step, after the warm-up."""
    if step < num_warmup_steps:
        return rising(step, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def cosine(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Returns a factor that falls to 0 along half a cosine (Loshchilov and Hutter, SGDR, 2017) after the warm-up."""
    if step < num_warmup_steps:
        return rising(step, num_warmup_steps)
    progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


FACTORS: dict[str, Callable[..., float]] = {
    "linear": linear,
    "cosine": cosine,
    "constant": flat,
    "constant_with_warmup": constant,
}
