"""Out of memory in a step: repeats the window with smaller micro-batches (`auto_find_batch_size`).

Each micro-batch is cut into parts and gradients are accumulated over all of them, so the optimizer step still sees the
same samples with the same weights: the effective batch stays the same. The weights are as before the failed
step, since nothing was updated; `WindowMark.rewind` restores random states, losses and counts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from trainwright._types import Batch, Nested
from trainwright.state.progress import Progress
from trainwright.support.hooks import LoopEngine, RandomStates
from trainwright.support.tensor_tree import count_samples

logger = logging.getLogger(__name__)


class MicroBatchPart(NamedTuple):
    """A micro-batch, or a part of one."""

    inputs: Batch
    of_micro_batch: float = 1.0  # its share of the micro-batch's samples
    of_window: float = 1.0  # its share of the window's samples
    number: int = 0  # index of the micro-batch in its window
    rows: slice | None = None  # its rows of the micro-batch; None for all


def split_batches(batches: list[Batch], num_parts: int) -> list[MicroBatchPart]:
    """Cuts each micro-batch of a window into `num_parts` (or single samples, if it has fewer), with their shares."""
    sizes = [count_samples(batch) or 1 for batch in batches]
    total = sum(sizes)
    if num_parts == 1:
        pairs = zip(batches, sizes, strict=True)
        return [MicroBatchPart(batch, 1.0, size / total, number) for number, (batch, size) in enumerate(pairs)]
    return [
        MicroBatchPart(inputs, (rows.stop - rows.start) / size, (rows.stop - rows.start) / total, number, rows)
        for number, (batch, size) in enumerate(zip(batches, sizes, strict=True))
        for inputs, rows in cut_window(batch, size, num_parts)
    ]


def cut_window(batch: Batch, size: int, num_parts: int) -> Iterator[tuple[Batch, slice]]:
    """Yields the parts of a batch of `size` samples, each with its rows.

    Entries without that first dimension go into every part.
    """
    for rows in torch.arange(size).tensor_split(min(num_parts, size)):
        first = int(rows[0])
        last = int(rows[-1]) + 1
        yield _cut(batch, first, last, size), slice(first, last)


def _cut(batch: Batch, first: int, last: int, size: int) -> Batch:
    """Returns some samples of a batch: the rows `first` to `last` of each entry, or these entries of a list."""
    if isinstance(batch, Mapping):
        return {name: _slice(value, first, last, size) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)) and any(isinstance(value, torch.Tensor) for value in batch):
        return type(batch)(_slice(value, first, last, size) for value in batch)
    return _slice(batch, first, last, size)


def _slice(value: object, first: int, last: int, size: int) -> Nested:
    if isinstance(value, torch.Tensor):
        return value[first:last] if value.dim() > 0 and value.shape[0] == size else value
    return value[first:last] if isinstance(value, (list, tuple)) and len(value) == size else value


class SmallerMicroBatches:
    """Retries windows that do not fit into memory with smaller micro-batches; only with `auto_find_batch_size`."""

    def __init__(self, engine: LoopEngine, random_states: RandomStates) -> None:
        self._engine = engine
        self.random_states = random_states

    def can_cut(self, progress: Progress, error: BaseException, window: list[Batch]) -> bool:
        """Returns True if an error means that memory is full, and a micro-batch has several samples to split."""
        largest = max(count_samples(batch) or 1 for batch in window)
        return self._engine.is_out_of_memory(error) and progress.window.num_parts < largest

    def makes_room(self, progress: Progress, event: str, error: RuntimeError) -> bool:
        """After an error of a callback: returns True if memory was freed, so that it should be called once more.

        Nothing is undone, so this is for events outside a window, or before any of it is trained. After an event within
        a window, the whole window is repeated.
        """
        is_within = event == "on_substep_end"
        if event == "on_pre_optimizer_step" and not self._engine.updates_in_clip:
            is_within = True
        if is_within or not self._engine.is_out_of_memory(error):
            return False
        if progress.window.current is None or self.can_cut(progress, error, progress.window.current.batches):
            self.cut(progress)
        else:
            self._engine.empty_cache()
        return True

    def batch_size(self, progress: Progress, window: list[Batch]) -> int:
        """Returns the samples of a micro-batch as it is now cut."""
        return math.ceil(max(count_samples(batch) or 1 for batch in window) / progress.window.num_parts)

    def cut(self, progress: Progress) -> None:
        """Cuts micro-batches into twice as many parts from now on, after their window was rewound."""
        progress.window.num_parts *= 2
        self._engine.empty_cache()
        logger.warning(
            "Out of memory at step %d: from now on, micro-batches are cut into %d parts, with gradients accumulated "
            "over them, so the effective batch stays the same.",
            progress.state.global_step + 1,
            progress.window.num_parts,
        )
