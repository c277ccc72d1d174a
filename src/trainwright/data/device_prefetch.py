"""Copies the next batches to the device while the step before them is computed; this process never waits for a copy.

A batch that was fetched ahead is copied on a stream of its own, out of pinned memory. When it is given out, the stream
that computes is told to wait for that copy (the device waits, not this process), and the allocator is told that this
stream uses the memory too: a batch that is let go while kernels still read it is not written over.

What is not a pinned tensor, or lies in an object of another kind than mappings that can be changed, lists and tuples,
stays as it is; `_prepare_inputs` moves it as ever.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

AT_MOST_BYTES = 256 * 2**20  # of a window: all its batches are on the device at once, where one by one they need not be


@dataclass(slots=True)
class PrefetchedBatch:
    """A batch whose tensors may still be on their way."""

    batch: object  # as it will be when they have arrived
    tensors: list[torch.Tensor] = field(default_factory=list)  # of it that were sent
    event: torch.Event | None = None  # when the last of them has arrived; None where none was sent


class DevicePrefetcher:
    """Copies batches to a device on a stream of its own; `computing` tells the stream on which they are used."""

    def __init__(self, device: torch.device, *, stream: torch.Stream, computing: Callable[[], torch.Stream]) -> None:
        self._device = device
        self._stream = stream
        self._computing = computing
        self._bytes_left = AT_MOST_BYTES

    def begin_window(self) -> None:
        """Resets the limit on the bytes of a window: the batches copied so far are about to be used."""
        self._bytes_left = AT_MOST_BYTES

    def send(self, batch: object) -> PrefetchedBatch:
        """Begins to copy a batch to the device; `receive` must be called before it is used."""
        sent = PrefetchedBatch(batch)
        with self._stream:
            sent.batch = map_tensors(lambda tensor: self._copied(tensor, sent.tensors), batch)
            if sent.tensors:
                sent.event = self._stream.record_event()
        return sent

    def receive(self, sent: PrefetchedBatch) -> Any:  # of the type that was sent
        """Returns the batch, safe to use on the stream that computes now."""
        if sent.event is not None:
            computing = self._computing()
            computing.wait_event(sent.event)
            for tensor in sent.tensors:
                tensor.record_stream(computing)
        return sent.batch

    def _copied(self, tensor: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.nbytes > self._bytes_left or not tensor.is_pinned():
            return tensor
        self._bytes_left -= tensor.nbytes
        tensors.append(tensor.to(self._device, non_blocking=True))
        return tensors[-1]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Applies a function to the tensors of a batch.

    Args:
        function: called with each tensor.
        batch: nested mappings, lists and tuples; it is not changed, and what is none of them stays as it is.

    Returns:
        A batch of the same kind, with whatever else its mappings carry.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):
        return _with_values(batch, {key: map_tensors(function, part) for key, part in batch.items()})
    if type(batch) in (list, tuple) or (isinstance(batch, tuple) and hasattr(batch, "_make")):
        parts = [map_tensors(function, part) for part in batch]
        return batch._make(parts) if hasattr(batch, "_make") else type(batch)(parts)
    return batch


def _with_values(mapping: MutableMapping[object, object], values: dict[object, object]) -> object:
    """A mapping of the same kind, with whatever else it carries."""
    if type(mapping) is dict:
        return values
    changed = copy.copy(mapping)
    for key, value in values.items():
        if value is not mapping[key]:
            changed[key] = value
    return changed


def make_prefetcher(dataloader: object, device: torch.device) -> DevicePrefetcher | None:
    """The copies of a dataloader's batches to a device; None where nothing can be copied beside the computation."""
    if device.type in ("cpu", "mps") or not getattr(dataloader, "pin_memory", False):
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    return DevicePrefetcher(
        device, stream=torch.Stream(device), computing=lambda: torch.accelerator.current_stream(device)
    )
