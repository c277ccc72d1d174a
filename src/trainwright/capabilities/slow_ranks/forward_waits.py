"""Tells the waiting within a forward pass from its work, where modules gather their weights from other processes.

Each such module has a hook that gathers, and waits for whoever has not come. Two more hooks stand around it: the time
between them is waiting, and the rest of the forward pass is work of this process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.state.progress import FORWARD, WAITING, Clock

Pair = tuple[torch.Event, torch.Event]


def put_around(modules: Sequence[nn.Module], before: Callable[[], None], after: Callable[[], None]) -> list[Any]:
    """Calls `before` and `after` around the forward hooks that modules have; returns torch's handles of both."""

    def first(module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            before()

    def last(module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            after()

    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(first, prepend=True))
        handles.append(module.register_forward_pre_hook(last))
    return handles


class HostWaits:
    """Counts the waiting by the clock of the run, as a phase of its own: for processes that work on the host.

    Only in forward passes of the training. Those of an evaluation, and those that a backward pass repeats, are in other
    phases, which stay whole.
    """

    def __init__(self, modules: Sequence[nn.Module], clock: Clock) -> None:
        self._clock = clock
        self._is_counted = False
        self._handles = put_around(modules, self._before, self._after)

    def _before(self) -> None:
        self._is_counted = self._clock.phase == FORWARD
        if self._is_counted:
            self._clock.mark(WAITING)

    def _after(self) -> None:
        if self._is_counted:
            self._clock.mark(FORWARD)
            self._is_counted = False

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


class DeviceWaits:
    """Counts the waiting on the device, by two events for each module, between `begin` and `end`.

    The second event follows the copy of the gathered weights on the stream that computes, so that stream has nothing
    else to do between the two. Nothing waits for the events.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._is_counted = False
        self._pairs: list[Pair] = []
        self._begun: torch.Event | None = None
        self._handles = put_around(modules, self._before, self._after)

    def begin(self) -> None:
        """Counts from here on."""
        self._is_counted = True
        self._pairs = []

    def end(self) -> list[Pair]:
        """Counts no more; returns the events before and after each waiting."""
        self._is_counted = False
        return self._pairs

    def _before(self) -> None:
        self._begun = self._event() if self._is_counted else None

    def _after(self) -> None:
        if self._begun is not None:
            self._pairs.append((self._begun, self._event()))
            self._begun = None

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
