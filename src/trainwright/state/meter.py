"""LossMeter: running loss on the device, read back by `drain()`, and by a guard that knows it is in main memory.

Adding costs one addition on the device and one list append, without a test for NaN: a non-finite loss makes the total
non-finite, and only then does `drain` read the single losses, to count the non-finite ones and to leave them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from trainwright.errors import ModelError
from trainwright.state.recorded_metrics import RecordedMetrics

COMPACT_AFTER = 1024  # single losses of finished steps, held as one tensor each, before they are packed into one


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
        self._num_packed = 0  # losses in `_packed`
        # The window, if losses have item counts: the loss as it was added, loss x items, items.
        self.by_items: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._num_steps: list[int] = []  # losses added before each step ended, to know "steps so far" at a loss

    def add(self, loss: torch.Tensor) -> None:
        """Adds the loss of a micro-batch, a detached scalar (else a ModelError), without waiting for the device."""
        try:
            self.total += loss
        except RuntimeError as error:
            if getattr(loss, "ndim", 0) == 0:
                raise
            raise ModelError(
                f"The loss of a micro-batch has the shape {tuple(loss.shape)}; return a scalar, as loss.mean() is."
            ) from error
        self._losses.append(loss)

    def end_step(self) -> None:
        """Marks the end of an optimizer step: the mean that replaces a non-finite loss is one over steps."""
        self._num_steps.append(self.count)
        if len(self._losses) >= COMPACT_AFTER:
            self._pack()

    def sum_step(self) -> torch.Tensor:
        """Returns the sum of the losses since the last step ended, on the device."""
        losses = self._take_step_losses()
        return losses[0] if len(losses) == 1 else torch.stack([loss.reshape(()).float() for loss in losses]).sum()

    def read_step_loss(self) -> float:
        """Returns the sum of the losses since the last step ended; for losses in main memory, so nothing waits."""
        losses = self._take_step_losses()
        return losses[0].item() if len(losses) == 1 else sum([loss.item() for loss in losses])

    def _take_step_losses(self) -> list[torch.Tensor]:
        num_before = self._num_steps[-1] if self._num_steps else 0
        return self._losses[num_before - self._num_packed :]

    def newest(self, number: int) -> list[torch.Tensor]:
        """Returns the losses that were added last, as far as they are single ones; a drain removes all."""
        return self._losses[-number:] if number else []

    @property
    def count(self) -> int:
        """Number of losses added since the last drain."""
        return self._num_packed + len(self._losses)

    def divide_by_items(self, divisor: torch.Tensor) -> None:
        """Corrects the losses of the window, listed in `by_items`, to their share in the mean over all items."""
        for added, loss, _ in self.by_items:
            exact = (loss / divisor).to(added.dtype)
            self.total += exact - added
            added.copy_(exact)
        self.by_items = []

    def rewind(self, count: int) -> None:
        """Removes the losses of a window that is given up or tried again: the newest ones, down to a count."""
        self.by_items = []
        losses = [*(loss for packed in self._packed for loss in packed), *self._losses]
        self._packed = []
        self._num_packed = 0
        self._losses = []
        self.total.zero_()
        for loss in losses[:count]:
            self.add(loss)

    def drain(self, recorded: RecordedMetrics | None = None) -> LossReading:
        """Reads the sum back, as a mean over processes, and starts a new one. All processes call it together.

        The numbers in `recorded` are read and exchanged with it.
        """
        total = self.total.item() if recorded is None else recorded.read_with(self.total)
        bad = 0
        if total - total != 0.0:  # NaN or infinite: a loss is
            total, bad = self._without_non_finite(total)
        if self._collect is not None:
            message = torch.tensor([total, float(bad)], dtype=torch.float32)
            if recorded is not None and recorded.agreed_bytes:
                messages = self._collect(torch.cat([message.view(torch.uint8), recorded.message()]))
                recorded.receive(messages[:, 8:])
                readings = messages[:, :8].contiguous().view(torch.float32)
            else:
                readings = self._collect(message)
            total = readings[:, 0].contiguous().mean().item()
            bad = int(readings[:, 1].sum())
        self.total.zero_()
        self._losses = []
        self._packed = []
        self._num_packed = 0
        self._num_steps = []
        return LossReading(total, bad)

    def _pack(self) -> None:
        self._packed.append(torch.stack([loss.reshape(()).float() for loss in self._losses]))
        self._num_packed += len(self._losses)
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
        steps = 0
        end = next(ends)
        for index, value in enumerate(values):
            while index >= end:
                steps += 1
                end = next(ends)
            total += value if torch.isfinite(value) else total / (1 + steps)
        return float(total), bad
