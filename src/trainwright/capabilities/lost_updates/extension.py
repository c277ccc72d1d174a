"""Logs the share of weights whose update rounded to nothing, `lost_updates`, for weights in bfloat16 and float16.

An update is lost if it is smaller than half of the weight's last bit: the weight is the same number afterwards. The
neighbours of a weight of 0.02 in bfloat16 are 0.00012 away, and AdamW moves it by about the learning rate, so that at
1e-5 nearly all updates are lost.

The share is that of a sample: up to 2,048 weights of each of up to 32 parameters, before and after the update of a step
that is logged, or of each tenth step if logs do not come by steps. Weights with a gradient of zero do not count. The
counts stay on the device until the log, which waits for the loss anyway. With several processes, each measures its own
weights, and the log is that of the first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from trainwright._types import Optimizer, StateDict, is_count
from trainwright.callbacks.flow import is_log_due
from trainwright.loop.extension import Decision, Extension, Run, StepFacts
from trainwright.support.optimizer_facts import keeps_small_updates
from trainwright.support.tensor_tree import local_part

logger = logging.getLogger(__name__)

LOW = (torch.bfloat16, torch.float16)
MOST_PARAMETERS = 32
MOST_WEIGHTS = 2048  # for each parameter
EVERY = 10  # steps, if logs do not come by steps
WARNS_FROM = 0.5
MOST = 1 << 60  # highest count accepted from a checkpoint


class Before(NamedTuple):
    """A sample of a parameter before an update."""

    parameter: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor  # True if the gradient is not zero


class LostUpdates(Extension):
    """Measures the share of weights that a step leaves as they were.

    Args:
        args: arguments of the run.
    """

    name = "lost_updates"
    order = 90  # after the extensions that may refuse the step

    def __init__(self, args: Any) -> None:
        self._args = args
        self._run: Run | None = None
        self._before: list[Before] = []
        # Counts of lost and of all updates, on the device: since the last log, and of the last step that was measured.
        self._counts: torch.Tensor | None = None
        self._newest: tuple[int, torch.Tensor] | None = None
        self._is_told = False

    def open(self, run: Run) -> None:
        """Begins at zero."""
        self._counts = None
        self._newest = None
        self._is_told = False

    def begin(self, run: Run) -> None:
        """Keeps the run, which knows when it logs."""
        self._run = run

    def decide(self, facts: StepFacts) -> Decision:
        """Keeps a sample of the weights that are about to be updated."""
        optimizer = facts.optimizer
        is_measured = self._is_due(facts.step) and has_rates(optimizer) and not keeps_small_updates(optimizer)
        self._before = [*sample(optimizer)] if is_measured else []
        return Decision.APPLY

    def _is_due(self, step: int) -> bool:
        assert self._run is not None
        if self._args.logging_strategy != "steps" and step % EVERY == 0:
            return True
        return is_log_due(self._args, self._run.progress.state, step)

    def after_step(self, run: Run) -> None:
        """Compares the sample with the updated weights."""
        before = self._before
        self._before = []
        if not before:
            return
        self._add_newest()
        counted = []
        for parameter, values, counts in before:
            is_lost = (sampled(parameter) == values) & counts
            counted.append(torch.stack([is_lost.sum(), counts.sum()]).to(before[0].values.device))
        self._newest = run.progress.state.global_step, torch.stack(counted).sum(0)

    def refused(self, step: int) -> None:
        """Forgets a step without an update; on a GPU a run learns of it one step later."""
        self._before = []
        if self._newest is not None and self._newest[0] == step:
            self._newest = None

    def _add_newest(self) -> None:
        """Adds the counts of the last measured step, which was made."""
        if self._newest is not None:
            counts = self._newest[1]
            self._counts = counts if self._counts is None else self._counts.to(counts.device) + counts
            self._newest = None

    def log(self) -> dict[str, float]:
        """Returns the share since the last log, and warns once if it is large."""
        self._add_newest()
        lost, total = (0, 0) if self._counts is None else self._counts.tolist()
        self._counts = None
        if not total:
            return {}
        share = lost / total
        if share >= WARNS_FROM and not self._is_told:
            self._is_told = True
            logger.warning(
                "lost_updates=%.2f: this share of the weights did not move, because their updates are smaller than "
                "half of their last bit. Set optim='adamw_bf16', which keeps what the weights cannot hold, or load the "
                "model with dtype=torch.float32 and set bf16=True.",
                share,
            )
        return {"lost_updates": share}

    def state_dict(self) -> StateDict:
        """Returns the counts since the last log; `settle` came before."""
        self._add_newest()
        return {} if self._counts is None else {"counts": self._counts.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        """Goes on from the counts of a checkpoint."""
        counts = state.get("counts")
        is_sound = isinstance(counts, list) and len(counts) == 2 and all(is_count(one) and one < MOST for one in counts)
        self._counts = torch.tensor(counts) if is_sound else None  # the share is a number for the log, and no more

    def close(self) -> None:
        """Releases the run and the weights."""
        self._run = None
        self._before = []


def is_low(tensor: torch.Tensor) -> bool:
    """Returns True for numbers of 16 bits."""
    return tensor.dtype in LOW


def has_rates(optimizer: Optimizer) -> bool:
    """Returns False if all learning rates are zero, as in the first step of a warm-up: no weight is to move."""
    return any(group["lr"] for group in optimizer.param_groups)


def sample(optimizer: Optimizer) -> Iterator[Before]:
    """Yields some weights of some of the parameters that a step would move."""
    every = [p for group in optimizer.param_groups for p in group["params"] if is_low(p) and p.grad is not None]
    stride = -(-len(every) // MOST_PARAMETERS) or 1
    for parameter in every[::stride]:
        if not parameter.grad.is_sparse:
            yield Before(parameter, sampled(parameter).clone(), sampled(parameter.grad) != 0)


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns evenly spaced numbers of a tensor, or of this process's part of it; a view if its layout allows."""
    flat = local_part(tensor).reshape(-1)
    return flat[:: -(-flat.numel() // MOST_WEIGHTS) or 1]
