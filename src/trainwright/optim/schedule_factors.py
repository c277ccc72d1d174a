"""The learning-rate schedules that most runs have, as factors of the rate by step.

They give what transformers' give, bit for bit. They are here because transformers' file of schedules loads PEFT,
bitsandbytes and what these load: seconds and 60 MB before the first step of a run that uses none of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


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
    """Returns a factor that falls to 0 along half a cosine after the warm-up.

    Source: Loshchilov and Hutter, SGDR, 2017, without restarts.
    """
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


def make(name: str, optimizer: Optimizer, **steps: int) -> LambdaLR | None:
    """Makes the schedule `name` of `num_warmup_steps` and `num_training_steps`; None if it is none of these."""
    return LambdaLR(optimizer, partial(FACTORS[name], **steps)) if name in FACTORS else None
