"""Logs the share of weights whose update rounded to nothing, `lost_updates`, for weights in bfloat16 and float16.

An update is lost if it is smaller than half of the weight's last bit: the weight is the same number afterwards. The
neighbours of a weight of 0.02 in bfloat16 are 0.00012 away, and AdamW moves it by about the learning rate, so that at
1e-5 nearly all updates are lost.

The share is that of a sample: up to 2,048 weights of each of up to 32 parameters, before and after the update of a step
that is logged, or of each tenth step if logs have no rhythm of steps. Weights with a gradient of zero do not count. The
counts stay on the device until the log, which waits for the loss anyway. In a run of several processes the share is
that of the weights of the first one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from trainwright._types import Optimizer, StateDict, is_count
from trainwright.loop.extension import Decision, Extension, Run, StepFacts

logger = logging.getLogger(__name__)

LOW = (torch.bfloat16, torch.float16)
MOST_PARAMETERS = 32
MOST_WEIGHTS = 2048  # of a parameter
EVERY = 10  # steps, where logs have no rhythm
WARNS_FROM = 0.5
MOST = 1 << 60  # of a count in a checkpoint
# What the states of optimizers that keep the lost part are called: ours, torchao's and optimi's.
KEEPING = ("rest", "kahan", "compensation")


class Before(NamedTuple):
    """A sample of a parameter before an update."""

    parameter: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor  # True where the gradient is not zero


class LostUpdates(Extension):
    """Measures the share of weights that a step leaves as they were.

    Args:
        args: arguments of the run.
    """

    name = "lost_updates"
    order = 90  # after those that may refuse the step

    def __init__(self, args: Any) -> None:
        self._args = args
        self._run: Run | None = None
        self._before: list[Before] = []
        self._optimizer: Optimizer | None = None  # which updates the sample
        self._counts: torch.Tensor | None = None  # lost, and all: on the device, since the last log
        self._is_told = False

    def open(self, run: Run) -> None:
        """Begins at zero."""
        self._counts = None
        self._is_told = False

    def begin(self, run: Run) -> None:
        """Keeps the run, which knows the rhythm of its logs."""
        self._run = run

    def decide(self, facts: StepFacts) -> Decision:
        """Keeps a sample of the weights that are about to be updated."""
        self._optimizer = facts.optimizer
        self._before = [*sample(facts.optimizer)] if self._is_due(facts.step) and has_rates(facts.optimizer) else []
        return Decision.APPLY

    def _is_due(self, step: int) -> bool:
        assert self._run is not None
        if str(getattr(self._args.logging_strategy, "value", self._args.logging_strategy)) != "steps":
            return step % EVERY == 0
        rhythm = self._run.progress.state.logging_steps
        return step % max(int(rhythm), 1) == 0 or (step == 1 and bool(self._args.logging_first_step))

    def after_step(self, run: Run) -> None:
        """Compares the sample with the weights that are there now."""
        before = self._before
        self._before = []
        if not before or self._optimizer is None or keeps_the_rest(self._optimizer):
            return
        counted = []
        for parameter, values, counts in before:
            is_lost = (sampled(parameter) == values) & counts
            counted.append(torch.stack([is_lost.sum(), counts.sum()]))
        found = torch.stack([one.to(counted[0].device) for one in counted]).sum(0)
        self._counts = found if self._counts is None else self._counts.to(found.device) + found

    def refused(self, step: int) -> None:
        """Forgets the sample of a step without an update."""
        self._before = []

    def log(self) -> dict[str, float]:
        """Returns the share since the last log, and warns of a large one."""
        lost, total = (0, 0) if self._counts is None else self._counts.tolist()
        self._counts = None
        if not total:
            return {}
        share = lost / total
        if share >= WARNS_FROM and not self._is_told:
            self._is_told = True
            logger.warning(
                "lost_updates=%.2f: that share of the weights did not move, because their updates are smaller than "
                "half of their last bit. Set optim='adamw_bf16', which keeps what the weights cannot hold, or load the "
                "model with dtype=torch.float32 and set bf16=True.",
                share,
            )
        return {"lost_updates": share}

    def state_dict(self) -> StateDict:
        """Returns the counts since the last log."""
        return {} if self._counts is None else {"counts": self._counts.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        """Goes on from the counts of a checkpoint."""
        counts = state.get("counts")
        is_sound = isinstance(counts, list) and len(counts) == 2 and all(is_count(one) and one < MOST for one in counts)
        self._counts = torch.tensor(counts) if is_sound else None  # the share is a number for the log, and no more

    def close(self) -> None:
        """Releases the run and the weights."""
        self._run = None
        self._optimizer = None
        self._before = []


def is_low(tensor: torch.Tensor) -> bool:
    """Returns True for numbers of 16 bits."""
    return tensor.dtype in LOW


def has_rates(optimizer: Optimizer) -> bool:
    """Returns False where all learning rates are zero, as in the first step of a warm-up: no weight is to move."""
    return any(group["lr"] for group in optimizer.param_groups)


def keeps_the_rest(optimizer: Optimizer) -> bool:
    """Returns True if an optimizer keeps what weights cannot hold, or rounds by chance; asked after a step."""
    names = {name for state in [*optimizer.state.values()][:1] for name in state}
    return getattr(optimizer, "bf16_stochastic_round", False) or any(word in name for name in names for word in KEEPING)


def sample(optimizer: Optimizer) -> Iterator[Before]:
    """Yields some weights of some of the parameters that a step would move."""
    every = [p for group in optimizer.param_groups for p in group["params"] if is_low(p) and p.grad is not None]
    stride = -(-len(every) // MOST_PARAMETERS) or 1
    for parameter in every[::stride]:
        if not parameter.grad.is_sparse:
            yield Before(parameter, sampled(parameter).clone(), sampled(parameter.grad) != 0)


@torch.no_grad()
def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns some numbers of a tensor, or of the part of it that this process has: a view where its layout allows."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = part.detach().reshape(-1)
    return flat[:: -(-flat.numel() // MOST_WEIGHTS) or 1]
