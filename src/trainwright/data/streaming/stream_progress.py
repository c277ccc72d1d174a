"""How far a run is in a stream: what the loader asks where positions are not computed but followed."""

from __future__ import annotations

from typing import Any

from trainwright._types import has_length
from trainwright.data.cursor import Cursor
from trainwright.data.streaming.stream_dataloader import StreamDataLoader
from trainwright.data.streaming.stream_state import EpochProgress, part_of, progress_at


class StreamProgress:
    """Follows the batches of a `StreamDataLoader` through an epoch.

    Attributes:
        progress: behind the batch given last.
        num_formed: samples that were given in batches formed by length, over all processes.
    """

    def __init__(self, dataloader: StreamDataLoader) -> None:
        self._dataloader = dataloader
        self._items = dataloader.items
        self.progress = self._before = EpochProgress()
        self.num_formed = 0

    def fetched(self) -> Any:
        """Where the batch comes from that was fetched just now."""
        return self._dataloader.origin

    def give(self, origin: Any) -> None:
        """A batch goes to training."""
        self.progress.add(origin)
        parts = 1 if self._items.split is None else self._items.split.num_parts
        self.num_formed += (origin.num_samples or 0) * parts

    def begin_window(self) -> None:
        self._before = self.progress.copy()

    def rewind(self) -> None:
        self.progress = self._before

    def resume(self, cursor: Cursor, saved: dict[str, Any] | None) -> int:
        """The next epoch begins at a checkpoint's position; returns how many batches of it count as done."""
        self._items.start = (cursor.epoch, progress_at(cursor.samples, saved, self._items.split))
        if cursor.seed is not None:
            self._items.seed = cursor.seed
        return self.batches_before(cursor)

    def seek(self, epoch: int, skip_batches: int) -> None:
        items = self._items
        if epoch != items.start[0]:  # another trainer's checkpoint knows the batches only
            items.start = (epoch, EpochProgress.passed_over(skip_batches * items.chunk_size, items.split))
        self.progress = items.start[1].copy()
        self.progress.part, self.progress.batches = part_of(items.split), skip_batches
        items.set_epoch(epoch)

    def batches_before(self, cursor: Cursor) -> int:
        if cursor.batches is not None and cursor.chunk == self.chunk:
            return cursor.batches
        return -(-cursor.samples // self.chunk)

    @property
    def counted_batches(self) -> int | None:
        """Batches on each process, where the samples do not tell: parts of a stream end one after the other."""
        return None if self._items.split is None else self.progress.batches

    @property
    def chunk(self) -> int:
        return self._items.chunk_size

    @property
    def seed(self) -> int:
        return self._items.seed

    @property
    def num_samples(self) -> int | None:
        items = self._items
        return len(items) if items.former is None and items.split is None and has_length(items) else None

    @property
    def unit(self) -> str | None:
        items = self._items
        unit = None if items.former is None else items.former.unit
        if items.split is None:
            return unit
        return f"{unit or 'single samples'}, of {items.split.num_parts} parts read by a process each"
