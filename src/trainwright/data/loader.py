"""Loader: batches of an epoch from any position, and what a checkpoint must remember of it.

It fetches one batch ahead of the one that is trained, as the original does, so that random draws of a collator fall
between the same draws of dropout. A batch that lies ready when a checkpoint is written will be fetched again by the
resumed run; where fetching may draw random numbers, their state from before that fetch is kept for it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainwright._types import Batch
from trainwright.config.plans import OPEN_END
from trainwright.data.batch_sampler import BatchedDataset, BatchOrder
from trainwright.data.collators import draws_random_numbers
from trainwright.data.columns import is_columnar
from trainwright.data.cursor import Cursor, LoaderRandomness
from trainwright.data.device_prefetch import DevicePrefetcher
from trainwright.data.feistel import FeistelOrder
from trainwright.data.sample_seeding import SeededItems
from trainwright.data.samplers import EpochBatches, ShuffledOrder
from trainwright.data.stateful_loader import stateful_position
from trainwright.data.streaming.stream_dataloader import StreamDataLoader, StreamItems
from trainwright.data.streaming.stream_progress import StreamProgress

_END: Any = object()


class Loader:
    """Gives the batches of each epoch of a dataloader: ours, or any that the user made.

    Args:
        dataloader: anything that can be iterated once per epoch.
        random_state: returns the process's random states (python, numpy, torch).
        set_random_state: sets them.
        copies: sends batches to the device ahead of their use; None where they are moved when they are used.
    """

    def __init__(
        self,
        dataloader: Any,
        *,
        random_state: Callable[[], dict[str, Any]],
        set_random_state: Callable[[dict[str, Any]], None],
        copies: DevicePrefetcher | None = None,
    ) -> None:
        self.dataloader = dataloader
        self._random_state = random_state
        self._set_random_state = set_random_state
        self._copies = copies
        self._keeps_states = may_draw_in_this_process(dataloader)
        self._seeds_here = seeds_this_process(dataloader)
        self._resume = LoaderRandomness()
        self._moved = (-1, 0)  # an epoch, and by how many samples its batches are moved
        self._epoch_start: dict[str, Any] | None = None
        self._before_ahead: dict[str, Any] | None = None
        self._window_start: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        self._stream = StreamProgress(dataloader) if isinstance(dataloader, StreamDataLoader) else None
        self._own = stateful_position(dataloader) if self._batches is None and self._stream is None else None
        self.has_ended = False  # the batch given last was the last one of its epoch

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        """What callbacks and overrides ask a dataloader (`dataset`, `batch_size`, ...) is answered by the user's."""
        if name == "dataloader":  # not set yet: being unpickled or copied
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def epoch(
        self, epoch: int, *, skip_batches: int = 0, after_first: Callable[[], None] | None = None
    ) -> Iterator[Batch]:
        """Batches of an epoch from number `skip_batches` on.

        `after_first` is called once the first one is fetched: the place where an interrupted run's random states
        belong, since it had fetched that batch before it was interrupted.
        """
        self.has_ended = False
        self._seek(epoch, skip_batches)
        batches: Iterator[Any] = self._fetch_from(skip_batches, resumes=after_first is not None)
        if self._copies is not None:
            batches = map(self._copies.send, batches)
        fetch: Any = self._fetch_as_it_was if self._seeds_here else next
        ahead = fetch(batches, _END)
        if after_first is not None:
            after_first()
        while ahead is not _END:
            batch, origin = ahead, self._stream.fetched() if self._stream is not None else None
            if self._keeps_states:
                self._before_ahead = self._random_state()
            if self._own is not None:
                self._own.note()
            ahead = fetch(batches, _END)
            if self._own is not None and ahead is _END:
                self._own.note()  # from here it begins its next epoch
            if self._stream is not None:
                self._stream.give(origin)
            self.has_ended = ahead is _END
            yield batch if self._copies is None else self._copies.receive(batch)

    def _fetch_as_it_was(self, batches: Iterator[Batch], end: object) -> Any:
        """The next batch; the random states, which it seeds, are afterwards what they were."""
        states = self._random_state()
        try:
            return next(batches, end)
        finally:
            self._set_random_state(states)

    def begin_window(self) -> None:
        """Remembers where the last finished step left the data, while the next one waits for its own."""
        if self._copies is not None:
            self._copies.begin_window()
        if self._keeps_states:
            self._window_start = (self._random_state(), self._before_ahead)
        if self._stream is not None:
            self._stream.begin_window()
        if self._own is not None:
            self._own.begin_window()

    def rewind(self) -> None:
        """Back to the beginning of the window, whose data will not be trained on any more."""
        if self._stream is not None:
            self._stream.rewind()
        if self._own is not None:
            self._own.rewind()
        self.has_ended = False
        if self._window_start is not None:
            states, self._before_ahead = self._window_start
            self._set_random_state(states)

    def cursor(self, epoch: int, batches: int, *, batches_per_epoch: int) -> Cursor:
        """The position after `batches` batches of an epoch; the end of one is the beginning of the next."""
        samples = self._samples_before(epoch, batches)
        if batches >= batches_per_epoch or (batches_per_epoch == OPEN_END and self.has_ended):
            epoch, samples = epoch + 1, 0
        return Cursor(
            epoch=epoch,
            samples=samples,
            seed=self._seed,
            num_samples=self.num_samples,
            unit=self.unit,
            batches=self._stream.counted_batches if self._stream is not None and samples > 0 else None,
            chunk=self.chunk,
        )

    def batches_left(self, cursor: Cursor, batches_per_epoch: int) -> int:
        """Batches of the cursor's epoch that are still to be trained."""
        if self._stream is not None:
            return batches_per_epoch - self._stream.batches_before(cursor)
        if self._batches is None:
            return batches_per_epoch - cursor.samples
        return self._batches.num_batches(cursor.samples)

    def randomness(self) -> LoaderRandomness:
        stream = self._stream.progress.to_dict() if self._stream is not None else None
        own = self._own.state if self._own is not None else None
        return LoaderRandomness(
            epoch_start=self._epoch_start, before_ahead=self._before_ahead, stream=stream, dataloader=own
        )

    def resume(self, cursor: Cursor, randomness: LoaderRandomness) -> tuple[int, int]:
        """Prepares to go on from a checkpoint's position; the next `epoch()` uses it.

        Returns the epoch, and how many batches of it count as done: those of a full epoch less those that are left.
        """
        self._resume = randomness
        order = self._batches.order if self._batches is not None else None
        if isinstance(order, (ShuffledOrder, FeistelOrder, BatchOrder)) and cursor.seed is not None:
            order.seed = cursor.seed
        if self._stream is not None:
            return cursor.epoch, self._stream.resume(cursor, randomness.stream)
        if self._batches is None:
            if self._own is not None:
                self._own.resumed = randomness.dataloader
            return cursor.epoch, cursor.samples
        batches = len(self._batches) - self._batches.num_batches(cursor.samples)
        self._moved = (cursor.epoch, cursor.samples - batches * self._batches.share.chunk_size)
        return cursor.epoch, batches

    def _samples_before(self, epoch: int, batches: int) -> int:
        """Samples of an epoch before a batch. Batches lie otherwise in an epoch that was begun with another size."""
        if self._stream is not None:
            return self._stream.progress.samples
        if self._batches is None:
            return batches  # all that is known of another's dataloader
        return batches * self._batches.share.chunk_size + (self._moved[1] if epoch == self._moved[0] else 0)

    def _seek(self, epoch: int, skip_batches: int) -> None:
        if self._batches is not None:
            self._batches.seek(epoch, self._samples_before(epoch, skip_batches))
            return
        if self._stream is not None:
            self._stream.seek(epoch, skip_batches)
            return
        parts = [self.dataloader, *(getattr(self.dataloader, name, None) for name in ("sampler", "dataset"))]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _fetch_from(self, skip_batches: int, *, resumes: bool) -> Iterator[Batch]:
        if resumes and self._resume.epoch_start is not None:
            self._set_random_state(self._resume.epoch_start)
        self._epoch_start = self._random_state()
        knows_place = self._own is not None and self._own.restore()
        batches: Iterator[Batch] = iter(self.dataloader)
        if knows_place and skip_batches == 0:  # an iterator of the epoch that had ended was made first
            self._set_random_state(self._epoch_start)
            torch.empty((), dtype=torch.int64).random_()  # the seed that making one draws
        if resumes and self._batches is not None:
            self._batches.draw()
        if self._batches is None and self._stream is None and not knows_place:  # what is trained is read again
            collections.deque(itertools.islice(batches, skip_batches), maxlen=0)
        if resumes and self._resume.before_ahead is not None:
            self._set_random_state(self._resume.before_ahead)
        return batches

    @property
    def num_formed(self) -> int:
        """Samples of a stream that were given in batches formed by length, over all processes."""
        return 0 if self._stream is None else self._stream.num_formed

    @property
    def _batches(self) -> EpochBatches | None:
        batches = getattr(self.dataloader, "batch_sampler", None)
        return batches if isinstance(batches, EpochBatches) else None

    @property
    def chunk(self) -> int | None:
        """Samples of a batch over all processes; None for a dataloader that is not of our making."""
        if self._stream is not None:
            return self._stream.chunk
        return self._batches.share.chunk_size if self._batches is not None else None

    @property
    def num_samples(self) -> int | None:
        """Samples in an epoch, over all processes, where that is known."""
        if self._stream is not None:
            return self._stream.num_samples
        return len(self._batches.order) if self._batches is not None else None

    @property
    def unit(self) -> str | None:
        """The settings by which batches are formed that positions count; None where they count samples."""
        if self._stream is not None:
            return self._stream.unit
        order = self._batches.order if self._batches is not None else None
        return order.unit if isinstance(order, BatchOrder) else None

    @property
    def _seed(self) -> int | None:
        if self._stream is not None:
            return self._stream.seed
        order = self._batches.order if self._batches is not None else None
        return order.seed if isinstance(order, (ShuffledOrder, FeistelOrder, BatchOrder)) else None


def may_draw_in_this_process(dataloader: Any) -> bool:
    """Whether fetching a batch may draw random numbers of this process; only what is known not to is trusted."""
    if not isinstance(dataloader, DataLoader):
        return True
    if dataloader.num_workers > 0:
        return False
    return draws_random_numbers(dataloader.collate_fn) or not _is_plain(dataloader.dataset)


def seeds_this_process(dataloader: Any) -> bool:
    """Whether fetching seeds the generators of this process for each sample, so that they must be put back."""
    dataset = getattr(dataloader, "dataset", None)
    seeds = isinstance(dataset, SeededItems) or (isinstance(dataset, StreamItems) and dataset.seeds_always)
    return seeds and bool(dataloader.num_workers == 0)


def _is_plain(dataset: Any) -> bool:
    """Data that lies ready: a list, tensors, or Arrow columns without a transform on the fly."""
    dataset = dataset.dataset if isinstance(dataset, BatchedDataset) else dataset
    if is_columnar(dataset):
        return bool(dataset.format["type"] != "custom")
    return type(dataset) in (list, tuple, TensorDataset)
