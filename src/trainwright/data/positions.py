"""Positions: progress in a dataloader, with one class for each kind of dataloader, and how a resume returns there.

- `IndexedPosition`: a dataset with indices. A position is computed from batches; nothing is read to reach it.
- `StreamPosition`: an iterable dataset, tracked batch by batch; a checkpoint stores its state besides the cursor.
- `ForeignPosition`: a user-made dataloader, counted in batches and re-read up to the position, unless it has
  `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader, its workers' states included).
"""

from __future__ import annotations

import collections
import copy
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainwright._types import Batch, DataLoaderLike, DatasetLike, SampleIds
from trainwright.data.batches import EpochBatches
from trainwright.data.cursor import Cursor, OrderKind, WindowSize, check_same_data, is_same_order, raise_another_order
from trainwright.data.order import Exclusion
from trainwright.data.prepared_dataloader import host_batches
from trainwright.data.sample_filter import EVERY_SAMPLE, SampleFilter
from trainwright.data.sample_ids import dispatched_parts
from trainwright.data.sampler_factory import reopen_order
from trainwright.data.shards import RankShare
from trainwright.data.sources import SourceStream
from trainwright.data.streaming.stream_state import (
    EpochProgress,
    is_shuffled_stream,
    progress_at,
)
from trainwright.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from trainwright.data.streaming.reader import StreamDataLoader

# Any: the state of a user's dataset or dataloader, and the user's dataloader itself.
State = dict[str, Any]


class LoaderPosition(ABC):
    """A position in the data of one dataloader."""

    chunk: int | None = None  # samples of a batch over all processes; None if unknown
    num_missing: int = 0  # number of excluded samples by which the next epochs are shorter than the dataset
    num_formed: int = 0  # samples in batches formed by length so far, over all processes
    is_stale: bool = False  # samples are to be excluded from the next `refresh` on
    has_mark: bool = False  # `begin_window` and `rewind` have an effect
    names_rows: bool = True  # a sample's id identifies its row; otherwise only its source
    is_fetched_ahead: bool = True  # a batch is fetched before the one before it is trained
    may_fetch_ahead: bool = False  # the dataloader itself may fetch a batch in the call for an earlier one
    begins_anew: bool = False  # once asked for a batch after the last one, the dataloader's state is of its next pass

    @abstractmethod
    def seek(self, epoch: int, skip_batches: int) -> None:
        """Makes the next `open` start at this epoch, after some of its batches."""

    @abstractmethod
    def open(
        self,
        skip_batches: int,
        *,
        resumes: bool,
        reset: Callable[[], None],
        before_last_skipped: Callable[[], None] | None = None,
    ) -> Iterator[Batch]:
        """Returns an iterator over the batches of the epoch, after the skipped ones.

        Args:
            skip_batches: number of batches to skip.
            resumes: True for the epoch of a checkpoint, or for the rest of the current epoch.
            reset: restores the random states of the beginning of the epoch.
            before_last_skipped: called before the last of `skip_batches` is read, if they are re-read.
        """

    def begin(self) -> None:  # noqa: B027 -- a computed position has nothing to track
        """Records that the first batch was fetched."""

    @abstractmethod
    def advance(self, *, is_last: bool) -> SampleIds:
        """Records that a batch goes to training; if fetched ahead, so is the next one, unless this is the last.

        Returns the ids of its samples, in the order of its rows; empty if unknown.
        """

    def end(self) -> None:  # noqa: B027
        """Records that the data ended after the last batch, which was not known to be the last."""

    def exclude(self, sample_filter: SampleFilter, num_samples: int) -> None:
        """Excludes samples from batches fetched from now on; replaces an earlier selection.

        Raises DataError if samples are not identified in this way, or if none would remain of the `num_samples` of a
        dataset with a length.
        """
        raise DataError(
            "Samples can only be excluded if the dataloader is the trainer's. Exclude them in the dataloader itself, "
            f"and delete {sample_filter.file_name} in output_dir."
        )

    def exclude_later(self, sample_filter: SampleFilter, num_samples: int) -> None:
        """Like `exclude`, during a run: if the batches of an epoch are counted, from the next `refresh` on."""
        self.exclude(sample_filter, num_samples)

    def refresh(self, epoch: int, batches: int) -> int:
        """Applies `exclude_later`, after some batches of an epoch.

        The rest of the epoch must be opened again. Returns how many of its batches count as done from now on.
        """
        return batches

    def save_remaining(self) -> None:  # noqa: B027
        """Makes the next `open` return the rest of the current epoch, in its order."""

    def begin_window(self) -> None:  # noqa: B027
        """Records the position before a window's batches are fetched."""

    def rewind(self) -> None:  # noqa: B027
        """Returns to the recorded position."""

    @abstractmethod
    def cursor(self, epoch: int, batches: int) -> Cursor:
        """Returns the position after some batches of an epoch; 0 for its beginning."""

    def state(self) -> State | None:
        """Returns the state that a checkpoint stores besides the cursor, depending on the kind.

        None if there is none.
        """
        return None

    def check_resume(self, cursor: Cursor, *, before: WindowSize, now: WindowSize, dataset: DatasetLike) -> str:
        """Checks that a run with steps of size `now` can resume at a position reached with steps of size `before`.

        Returns a message about the order of samples; empty if it does not change. An epoch begun in another kind of
        order is finished in that order. Raises CheckpointError if the position is counted in batches of another size,
        and DataError if the number of samples changed or their order cannot be restored.
        """
        here = self.cursor(cursor.epoch + 1, 0)
        assert here.order is not None
        is_same = cursor.samples == 0 or cursor.order is None or is_same_order(cursor.order, here.order)
        counts = is_same or here.unit is None  # groups formed differently may differ in number
        check_same_data(cursor, here.num_samples if counts else None, here.unit)
        if cursor.samples > 0 and cursor.order is None:
            number = cursor.epoch + 1
            return f"an older checkpoint, which does not name its order: epoch {number} is finished in this run's order"
        return "" if is_same else self._finish_order(cursor, here.order, dataset)

    def _finish_order(self, cursor: Cursor, now: OrderKind, dataset: DatasetLike) -> str:
        """Finishes the cursor's epoch in an order of another kind than this run's; returns a message about it."""
        raise_another_order(cursor, now)

    @abstractmethod
    def resume(self, cursor: Cursor, state: State) -> int:
        """Starts the next epoch at a checkpoint's position; returns how many of its batches count as done."""

    @abstractmethod
    def batches_left(self, cursor: Cursor, batches_per_epoch: int) -> int:
        """Returns the number of batches of the cursor's epoch that remain to be trained."""


class IndexedPosition(LoaderPosition):
    """A position in an order of indices, computed from the number of batches.

    Args:
        dataloader: yields the batches.
        batches: yields their indices.
        dispatched: the process that these parts of batches belong to, if the main process reads for all.
    """

    def __init__(
        self, dataloader: DataLoaderLike, batches: EpochBatches, *, dispatched: RankShare | None = None
    ) -> None:
        self._dataloader = dataloader
        self._batches = batches
        self._dispatched = dispatched
        self._gives_groups = batches.order.gives_groups
        # Indices of the batches sent for fetching; None if batches arrive in another order than they were sent, or are
        # not this process's own.
        self._sent: collections.deque[list[Any]] | None = None
        self._is_in_order = dispatched is None and getattr(dataloader, "in_order", True)
        self._computed: Iterator[list[Any]] = iter(())  # the indices of dispatched batches
        self._moved_epoch = -1  # an epoch that was begun in batches of another size
        self._moved_by = 0  # samples by which that epoch's batches are shifted
        self._announced: tuple[SampleFilter, int] = (EVERY_SAMPLE, 0)  # arguments of the next `exclude`
        self.chunk: int = batches.share.chunk_size
        self.num_missing = batches.num_missing

    def seek(self, epoch: int, skip_batches: int) -> None:
        self._batches.seek(epoch, self.samples_before(epoch, skip_batches))

    def open(
        self,
        skip_batches: int,
        *,
        resumes: bool,
        reset: Callable[[], None],
        before_last_skipped: Callable[[], None] | None = None,
    ) -> Iterator[Batch]:
        indices = self._batches
        indices.ahead = None if indices.order_epoch(indices.epoch).is_computable else collections.deque()
        indices.noted = self._sent = collections.deque() if self._is_in_order else None
        if self._dispatched is not None:
            computed = indices.computed(indices.epoch, indices.first_sample)
            whole = map(operator.itemgetter(0), computed) if self._gives_groups else computed
            self._computed = dispatched_parts(whole, self._dispatched)
        batches = host_batches(self._dataloader)
        if resumes and self._dataloader.num_workers == 0:  # workers already have their first batches
            indices.draw()
        return batches

    def advance(self, *, is_last: bool) -> SampleIds:
        if self._batches.ahead is not None:
            self._batches.ahead.popleft()
        if not self._sent:
            return next(self._computed, [])
        batch = self._sent.popleft()
        return batch[0] if self._gives_groups else batch

    def save_remaining(self) -> None:
        self._batches.save_remaining()

    def exclude(self, sample_filter: SampleFilter, num_samples: int) -> None:
        if not all(isinstance(sample, int) for sample in sample_filter.samples):
            raise DataError(
                f"The training dataset has indices: use them to name the samples in {sample_filter.file_name}."
            )
        self._batches.exclude(sample_filter, num_samples)
        self.num_missing = self._batches.num_missing

    def exclude_later(self, sample_filter: SampleFilter, num_samples: int) -> None:
        if self._batches.order.exclusion is Exclusion.SAME_SHARES:  # no sample moves to another batch
            self.exclude(sample_filter, num_samples)
            return
        before = self._batches.excluded
        filter_before = self._batches.sample_filter
        self.exclude(sample_filter, num_samples)  # for its errors
        self._announced = (sample_filter, num_samples)
        self.is_stale = self._batches.excluded != before
        self.exclude(filter_before, num_samples)

    def refresh(self, epoch: int, batches: int) -> int:
        if not self.is_stale:
            return batches
        cursor = self.cursor(epoch, batches)
        self.exclude(*self._announced)
        self.is_stale = False
        return self.resume(cursor, {}) if batches > 0 else 0

    def cursor(self, epoch: int, batches: int) -> Cursor:
        order = self._batches.order_epoch(epoch)
        return Cursor(
            epoch=epoch,
            samples=self.samples_before(epoch, batches),
            seed=order.seed,
            num_samples=len(order),
            unit=order.unit,
            chunk=self.chunk,
            order=order.describe(),
        )

    def check_resume(self, cursor: Cursor, *, before: WindowSize, now: WindowSize, dataset: DatasetLike) -> str:
        note = self._batches.order.continue_from(cursor)
        return note or super().check_resume(cursor, before=before, now=now, dataset=dataset)

    def _finish_order(self, cursor: Cursor, now: OrderKind, dataset: DatasetLike) -> str:
        num_samples = len(self._batches.order)
        order = reopen_order(cursor, now, forms_groups=self._gives_groups, num_samples=num_samples, dataset=dataset)
        self._batches.finish(cursor.epoch, order)
        return f"epoch {cursor.epoch + 1} is finished in the order it began with; the new order begins after it"

    def resume(self, cursor: Cursor, state: State) -> int:
        order = self._batches.order
        if order.seed is not None and cursor.seed is not None:
            order.seed = cursor.seed
        batches = len(self._batches) - self._batches.num_batches(cursor.samples, cursor.epoch)
        num_kept = self._batches.make_filter(cursor.epoch).num_kept(cursor.epoch, cursor.samples)
        self._moved_epoch = cursor.epoch
        self._moved_by = num_kept - batches * self.chunk
        return batches

    def batches_left(self, cursor: Cursor, batches_per_epoch: int) -> int:
        return self._batches.num_batches(cursor.samples, cursor.epoch)

    def samples_before(self, epoch: int, batches: int) -> int:
        """Returns the samples of an epoch before a batch; batches are shifted in an epoch begun with another size."""
        num_kept = batches * self.chunk + (self._moved_by if epoch == self._moved_epoch else 0)
        return self._batches.make_filter(epoch).place_after(epoch, num_kept)


class StreamPosition(LoaderPosition):
    """A position in a stream, tracked by the origins of its batches. `StreamItems` knows the kind of stream."""

    has_mark = True

    def __init__(self, dataloader: StreamDataLoader) -> None:
        self._dataloader = dataloader
        self._items = dataloader.items
        self._progress = EpochProgress()  # after the last batch returned
        self._before = self._progress  # at the beginning of the window
        self._ahead = dataloader.origin  # origin of the batch that is already fetched
        self.chunk: int = self._items.chunk_size
        self.num_missing = self._items.num_missing
        self.names_rows = not (isinstance(self._items.source, SourceStream) and is_shuffled_stream(self._items.source))

    def seek(self, epoch: int, skip_batches: int) -> None:
        items = self._items
        if epoch != items.start[0]:  # another trainer's checkpoint only has the number of batches
            items.start = (epoch, EpochProgress.passed_over(skip_batches * self.chunk, items.split))
        self._progress = items.start[1].copy()
        self._progress.part = items.split.part
        self._progress.batches = skip_batches
        items.set_epoch(epoch)

    def open(
        self,
        skip_batches: int,
        *,
        resumes: bool,
        reset: Callable[[], None],
        before_last_skipped: Callable[[], None] | None = None,
    ) -> Iterator[Batch]:
        return host_batches(self._dataloader)

    def begin(self) -> None:
        self._ahead = self._dataloader.origin

    def advance(self, *, is_last: bool) -> SampleIds:
        origin = self._ahead
        self._ahead = self._dataloader.origin
        assert origin is not None
        self._progress.add(origin)
        self.num_formed += (origin.num_samples or 0) * self._items.split.num_parts
        return origin.samples

    def exclude(self, sample_filter: SampleFilter, num_samples: int) -> None:
        self._items.exclude(sample_filter)
        self.num_missing = self._items.num_missing
        if self._dataloader.num_workers > 0:
            self._dataloader._iterator = None  # persistent workers would keep their earlier selection

    def begin_window(self) -> None:
        self._before = self._progress.copy()

    def rewind(self) -> None:
        self._progress = self._before

    def cursor(self, epoch: int, batches: int) -> Cursor:
        items = self._items
        samples = self._progress.samples if batches > 0 else 0
        return Cursor(
            epoch=epoch,
            samples=samples,
            seed=items.seed,
            num_samples=items.num_samples,
            unit=items.unit,
            batches=self._progress.batches if samples and not items.tells_batches else None,
            chunk=self.chunk,
            order=items.describe(),
        )

    def state(self) -> State:
        return {"stream": self._progress.to_dict()}

    def resume(self, cursor: Cursor, state: State) -> int:
        self._items.start = (cursor.epoch, progress_at(cursor.samples, state.get("stream"), self._items.split))
        if cursor.seed is not None:
            self._items.seed = cursor.seed
        return self._batches_before(cursor)

    def batches_left(self, cursor: Cursor, batches_per_epoch: int) -> int:
        return batches_per_epoch - self._batches_before(cursor)

    def _batches_before(self, cursor: Cursor) -> int:
        if self.num_missing:
            return len(self._dataloader) - self._items.num_batches_after(cursor.samples)
        if cursor.batches is not None and cursor.chunk == self.chunk:
            return cursor.batches
        return -(-cursor.samples // self.chunk)


class ForeignPosition(LoaderPosition):
    """A position in a user-made dataloader, in batches; with its own state if it has one."""

    has_mark = True
    is_fetched_ahead = False

    def __init__(self, dataloader: DataLoaderLike) -> None:
        self._dataloader = dataloader
        inside = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's wrappers always have the methods
        self._tells = all(callable(getattr(inside, name, None)) for name in ("state_dict", "load_state_dict"))
        # The dataloader's state after the last batch returned, and before the window.
        self._state: State | None = None
        self._at_window: State | None = None
        self._resumed: State | None = None  # a checkpoint's state, from which the next iteration begins; used once
        self.may_fetch_ahead = type(dataloader) is not DataLoader and not self._tells  # such as accelerate's
        self.begins_anew = self._tells

    def seek(self, epoch: int, skip_batches: int) -> None:
        batches = getattr(self._dataloader, "batch_sampler", None)
        inside = getattr(batches, "batch_sampler", None)  # accelerate's wrapper, for a process among several
        parts = [getattr(self._dataloader, name, None) for name in ("sampler", "dataset")]
        for part in (self._dataloader, batches, inside, *parts):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def open(
        self,
        skip_batches: int,
        *,
        resumes: bool,
        reset: Callable[[], None],
        before_last_skipped: Callable[[], None] | None = None,
    ) -> Iterator[Batch]:
        state = self._resumed
        self._resumed = None
        batches: Iterator[Batch]
        if state is None:
            batches = iter(self._dataloader)
            if skip_batches > 0:  # trained batches are read again
                collections.deque(itertools.islice(batches, skip_batches - 1), maxlen=0)
                if before_last_skipped is not None:
                    before_last_skipped()
                next(batches, None)
            return batches
        self._dataloader.load_state_dict(state)
        batches = iter(self._dataloader)
        if skip_batches == 0:  # an iterator of the epoch that had ended was made first
            reset()
            if isinstance(self._dataloader, DataLoader):
                torch.empty((), dtype=torch.int64).random_()  # consumes the seed that making that iterator drew
        return batches

    def advance(self, *, is_last: bool) -> SampleIds:
        self._state = self._state_now()
        return []

    def end(self) -> None:
        self._state = self._state_now()

    def begin_window(self) -> None:
        self._at_window = self._state

    def rewind(self) -> None:
        self._state = self._at_window

    def _state_now(self) -> State | None:
        if not self._tells:
            return None
        state: State = copy.deepcopy(self._dataloader.state_dict())  # it may return the object that it mutates
        return state

    def cursor(self, epoch: int, batches: int) -> Cursor:
        return Cursor(epoch=epoch, samples=batches, order={"kind": "dataloader"})

    def state(self) -> State | None:
        return None if self._state is None else {"dataloader": self._state}

    def check_resume(self, cursor: Cursor, *, before: WindowSize, now: WindowSize, dataset: DatasetLike) -> str:
        if before != now:
            raise CheckpointError(
                f"The checkpoint was written with steps of {before} samples, but this run has {now}. The training "
                "dataloader is not the trainer's, so the position is only known in batches. Resume with the "
                "same per_device_train_batch_size, gradient_accumulation_steps and number of processes."
            )
        return super().check_resume(cursor, before=before, now=now, dataset=dataset)

    def resume(self, cursor: Cursor, state: State) -> int:
        self._resumed = state.get("dataloader") if self._tells else None
        return cursor.samples

    def batches_left(self, cursor: Cursor, batches_per_epoch: int) -> int:
        return batches_per_epoch - cursor.samples


def make_position(dataloader: DataLoaderLike, *, dispatched: RankShare | None = None) -> LoaderPosition:
    """Returns the position for a dataloader; `dispatched` is this process's part if one process reads for all."""
    batches = getattr(dataloader, "batch_sampler", None)
    if isinstance(batches, EpochBatches):
        return IndexedPosition(dataloader, batches, dispatched=dispatched)
    if isinstance(getattr(dataloader, "dataset", None), IterableDataset):
        from trainwright.data.streaming.reader import StreamDataLoader

        if isinstance(dataloader, StreamDataLoader):
            return StreamPosition(dataloader)
    return ForeignPosition(dataloader)
