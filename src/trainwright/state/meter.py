"""LossMeter: running loss on the device. `drain()` is the only method that reads it back.

Adding costs one addition on the device and one list append, without a test for NaN: a non-finite loss makes the total
non-finite, and only then does `drain` read the single losses, to count the non-finite ones and to leave them out.

In main memory a scalar is read and written through its address, which takes a fraction of an operation of torch. The
sum of two numbers in double precision, rounded to single precision, is the one that torch computes in single precision.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float
from typing import NamedTuple

import torch

from trainwright.errors import ModelError
from trainwright.state.recorded_metrics import RecordedMetrics

COMPACT_AFTER = 1024  # single losses held as one tensor each before they are packed into one
TENSOR, FLOAT32, float_at = torch.Tensor, torch.float32, c_float.from_address


class NormReading:
    """The norm of gradients that clipping has read last, for those who are handed the same tensor."""

    norm: torch.Tensor | None = None
    value = 0.0


def in_main_memory(value: torch.Tensor) -> bool:
    """Returns True if a tensor's first number can be read through its address, as a `c_float`."""
    return type(value) is TENSOR and value.dtype is FLOAT32 and value.is_cpu


class LossReading(NamedTuple):
    """Losses since the last drain."""

    total: float  # sum of the losses since the last drain; non-finite ones replaced by the mean so far, if filtered
    num_non_finite: int  # number of losses that were NaN or infinite


class LossMeter:
    """Sums losses between two logs."""

    def __init__(
        self,
        device: torch.device | str,
        *,
        skip_non_finite: bool = True,
        collect: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.total = torch.tensor(0.0, device=device)  # read by overrides of the log hook, which may zero it in place
        # replace a NaN or infinite loss by the mean of the steps before it (`logging_nan_inf_filter`)
        self.skip_non_finite = skip_non_finite
        self._collect = collect  # stacks a tensor of each process along a new first dimension; None: one process
        self._losses: list[torch.Tensor] = []
        self._packed: list[torch.Tensor] = []
        # Of the window, where losses say their items: the loss as it was added, loss x items, items.
        self.by_items: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._num_steps: list[int] = []  # losses added before each step ended, to know "steps so far" at a loss
        self._known: torch.Tensor | None = None  # `total` as `add` saw it last
        self._total_at: c_float | None = None  # its memory; None: of a device
        self.step_loss: float | None = 0.0  # sum of the losses since the last step ended; None where one is not read

    def add(self, loss: torch.Tensor) -> None:
        """Adds the loss of a micro-batch, a detached scalar (else a ModelError), without waiting for the device."""
        if self.total is not self._known:
            self._known = self.total
            self._total_at = float_at(self.total.data_ptr()) if in_main_memory(self.total) else None
        if self._total_at is not None and in_main_memory(loss) and not loss.ndim:
            value = float_at(loss.data_ptr()).value
            self._total_at.value += value
            if self.step_loss is not None:
                self.step_loss += value
        else:
            self._add_on_device(loss)
        self._losses.append(loss)
        if len(self._losses) >= COMPACT_AFTER:
            self._pack()

    def _add_on_device(self, loss: torch.Tensor) -> None:
        self.step_loss = None
        try:
            self.total += loss
        except RuntimeError as error:
            if getattr(loss, "ndim", 0) == 0:
                raise
            raise ModelError(
                f"The loss of a micro-batch has the shape {tuple(loss.shape)}; return a scalar, as loss.mean() is."
            ) from error

    def end_step(self) -> None:
        """Marks the end of an optimizer step: the mean that replaces a non-finite loss is one over steps."""
        self._num_steps.append(self.count)
        self.step_loss = 0.0

    def of_this_step(self) -> torch.Tensor:
        """Returns the sum of the losses since the last step ended, on the device."""
        losses, steps = self._losses, self._num_steps
        number = len(losses) + COMPACT_AFTER * len(self._packed) - (steps[-1] if steps else 0)
        if number == 1 and losses:
            return losses[-1]
        since = losses[-number:] if number <= len(losses) else [*self._packed, *losses]
        return torch.cat([loss.reshape(-1).float() for loss in since])[-number:].sum()

    def newest(self, number: int) -> list[torch.Tensor]:
        """Returns the losses that were added last, as far as they are single ones; a drain removes all."""
        return self._losses[-number:] if number else []

    @property
    def count(self) -> int:
        """Number of losses added since the last drain."""
        return len(self._losses) + COMPACT_AFTER * len(self._packed)

    def divide_by_items(self, divisor: torch.Tensor) -> None:
        """Corrects the losses of the window, which are those `by_items`, to their share in the mean over all items."""
        for added, loss, _ in self.by_items:
            exact = (loss / divisor).to(added.dtype)
            self.total += exact - added
            added.copy_(exact)
        self.by_items, self.step_loss = [], None

    def rewind(self, count: int) -> None:
        """Removes the losses of a window that is given up or tried again: the newest ones, down to a count."""
        self.by_items = []
        losses = [*(loss for packed in self._packed for loss in packed), *self._losses]
        self._packed, self._losses = [], []
        self.total.zero_()
        for loss in losses[:count]:
            self.add(loss)
        self.step_loss = 0.0

    def drain(self, recorded: RecordedMetrics | None = None) -> LossReading:
        """Reads the sum back, as a mean over processes, and starts a new one. All processes call it together.

        The numbers in `recorded` are read and exchanged with it.
        """
        total = self.total.item() if recorded is None else recorded.read_with(self.total)
        bad = 0
        if total - total != 0.0:  # NaN or infinite: one of the losses is
            total, bad = self._without_non_finite(total)
        if self._collect is not None:
            message = torch.tensor([total, float(bad)])
            if recorded is not None and recorded.agreed_bytes:
                messages = self._collect(torch.cat([message.view(torch.uint8), recorded.message()]))
                recorded.receive(messages[:, 8:])
                readings = messages[:, :8].contiguous().view(torch.float32)
            else:
                readings = self._collect(message)
            total, bad = readings[:, 0].contiguous().mean().item(), int(readings[:, 1].sum())
        self.total.zero_()
        self._losses, self._packed, self._num_steps = [], [], []
        return LossReading(total, bad)

    def _pack(self) -> None:
        self._packed.append(torch.stack([loss.reshape(()).float() for loss in self._losses]))
        self._losses = []

    def _without_non_finite(self, raw_total: float) -> tuple[float, int]:
        if self._losses:
            self._pack()
        values = torch.cat(self._packed).cpu()
        bad = int((~torch.isfinite(values)).sum())
        if not self.skip_non_finite:
            return raw_total, bad
        total = torch.tensor(0.0)
        ends = iter([*self._num_steps, len(values) + 1])
        steps, end = 0, next(ends)
        for index, value in enumerate(values):
            while index >= end:
                steps, end = steps + 1, next(ends)
            total += value if torch.isfinite(value) else total / (1 + steps)
        return float(total), bad
