"""The three averages, as arithmetic on lists of tensors; the extension decides when weights enter and where they are.

Exponential (`ema`): average = d * average + (1 - d) * weights. With the warm-up d is at most (1 + n) / (10 + n) after n
entries, so that the first weights do not stay in it for long: 0.18 after the first, 0.5 after 8, 0.99 after 890.

Mean of all entries (`swa`): Polyak and Juditsky 1992 (doi:10.1137/0330046) for an entry at each step, Izmailov et al.
2018 (arXiv:1803.05407) for one at each epoch near the end of a run.

Mean of the last entries (`lawa`): Kaddour 2022 (arXiv:2209.14981). It keeps them, each as large as the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from trainwright.capabilities.averages.plan import AveragePlan
from trainwright.capabilities.averages.saved import Add, compute_mean, widened

Tensors = list[torch.Tensor]


class Average(Protocol):
    """An average of lists of tensors, of which each entry has the same shapes."""

    num: int  # entries so far

    def enter(self, weights: Sequence[torch.Tensor]) -> None:
        """Adds an entry; the tensors are copied."""

    def extend(self, weights: Sequence[torch.Tensor]) -> None:
        """Adds tensors that the entries so far lack, as if they had had these values in all of them."""

    def mean(self) -> Tensors:
        """Returns the average, in fp32 or wider; do not change it. There must be an entry."""

    @property
    def kept(self) -> list[Tensors]:
        """Tensors that a checkpoint needs besides `num`."""

    def load(self, num: int, kept: list[Tensors]) -> None:
        """Continues from the `num` and `kept` of another average of its kind."""


class RunningAverage:
    """An average in one copy of the weights, changed in place.

    Args:
        decay: None: the mean of all entries; else their exponential average.
        warms_up: the decay is lower for the first entries.
    """

    def __init__(self, decay: float | None, *, warms_up: bool = False) -> None:
        self.num = 0
        self._decay = decay
        self._warms_up = warms_up
        self._values: Tensors = []

    def enter(self, weights: Sequence[torch.Tensor]) -> None:
        if self.num == 0:
            self._values = [widened(one, copy=True) for one in weights]
        elif self._values:
            self._add()(self._values, [widened(one) for one in weights], self.num)
        self.num += 1

    def _add(self) -> Add:
        """Returns torch's function that adds the next entry."""
        add: Add
        if self._decay is None:
            add = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
            return add
        decay = min(self._decay, (1 + self.num) / (10 + self.num)) if self._warms_up else self._decay
        add = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        return add

    def extend(self, weights: Sequence[torch.Tensor]) -> None:
        if self.num:
            self._values += [widened(one, copy=True) for one in weights]

    def mean(self) -> Tensors:
        return self._values

    @property
    def kept(self) -> list[Tensors]:
        return [self._values] if self.num else []

    def load(self, num: int, kept: list[Tensors]) -> None:
        self.num = num
        self._values = [widened(one, copy=True) for one in kept[0]]


class LatestAverage:
    """The mean of the last entries, which are kept in the type of the weights.

    Args:
        last: number of entries.
    """

    def __init__(self, last: int) -> None:
        self.num = 0
        self._entries: deque[Tensors] = deque(maxlen=last)

    def enter(self, weights: Sequence[torch.Tensor]) -> None:
        self._entries.append([one.clone() for one in weights])
        self.num += 1

    def extend(self, weights: Sequence[torch.Tensor]) -> None:
        for entry in self._entries:
            entry += [one.clone() for one in weights]

    def mean(self) -> Tensors:
        return compute_mean(self._entries)

    @property
    def kept(self) -> list[Tensors]:
        return list(self._entries)

    def load(self, num: int, kept: list[Tensors]) -> None:
        self.num = num
        self._entries.clear()
        self._entries.extend([one.clone() for one in entry] for entry in kept)


def make_average(plan: AveragePlan) -> Average:
    """Returns an average without an entry."""
    if plan.kind == "lawa":
        return LatestAverage(plan.last)
    return RunningAverage(plan.decay if plan.kind == "ema" else None, warms_up=plan.warmup)
