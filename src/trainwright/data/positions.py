"""Positions: how far training is in a dataloader, one class for each kind of it, and how a resume gets back there.

- `IndexedPosition`: a dataset with indices. A position is computed from batches; nothing is read to get to it.
- `StreamPosition`: an iterable dataset, followed batch by batch; its own state lies beside the cursor in a checkpoint.
- `ForeignPosition`: a dataloader that the user made, counted in batches and read again up to it, unless it has
  `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader, its workers' states included).
"""

from __future__ import annotations

import collections
import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainwright._types import Batch, DataLoaderLike, DatasetLike, has_length
from trainwright.data.cursor import Cursor, OrderKind, WindowSize, check_same_data, is_same_order, raise_another_order
from trainwright.data.prepared_dataloader import host_batches
from trainwright.data.quarantine import NO_PLACES, QUARANTINE_NAME, Sample
from trainwright.data.sampler_factory import order_of_checkpoint
from trainwright.data.samplers import EpochBatches
from trainwright.data.streaming.stream_state import (
    EpochProgress,
    is_mixture_stream,
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

    chunk: int | None = None  # samples of a batch over all processes; None where that is not known
    num_left_out: int = 0  # samples by which the next epochs are shorter than the dataset
    num_formed: int = 0  # samples that were given in batches formed by length, over all processes
    is_stale: bool = False  # samples are to be left out from the next `refresh` on
    may_fetch_ahead: bool = False  # a batch may be fetched by the call for an earlier one

    @abstractmethod
    def seek(self, epoch: int, skip_batches: int) -> None:
        """The next `open` is for this epoch, after some of its batches."""

    @abstractmethod
    def open(
        self,
        skip_batches: int,
        *,
        resumes: bool,
        reset: Callable[[], None],
        before_last_skipped: Callable[[], None] | None = None,
    ) -> Iterator[Batch]:
        """Returns an iterator over the batches of the epoch after some.

        Args:
            skip_batches: how many batches are left out.
            resumes: True for the epoch of a checkpoint, or for the rest of the epoch under way.
            reset: sets the random states of the beginning of the epoch.
            before_last_skipped: called before the last of `skip_batches` is read, where they are read again.
        """

    def begin(self) -> None:  # noqa: B027 -- a position that is computed has nothing to follow
        """The first batch is fetched."""

    def advance(self, *, is_last: bool) -> None:  # noqa: B027
        """A batch goes to training; the one after it is fetched, or it is the last one."""

    def leave_out(self, samples: set[Sample], num_samples: int) -> None:
        """Leaves samples out of the batches that are fetched from now on, and those of an earlier call no more.

        Raises DataError where samples are not named like this, or none would be left of the `num_samples` of a dataset
        with a length.
        """
        raise DataError(
            "Samples can be left out where the dataloader is the trainer's. Leave them out of the dataloader itself, "
            "and delete quarantine.jsonl in output_dir."
        )

    def leave_out_later(self, samples: set[Sample], num_samples: int) -> None:
        """As `leave_out`, during a run: where the batches of an epoch are counted, from the next `refresh` on."""
        self.leave_out(samples, num_samples)

    def refresh(self, epoch: int, batches: int, *, window: int) -> int:
        """Leaves out what `leave_out_later` named, after some batches of an epoch; `window` of them are a step.

        The rest of the epoch has to be opened again. Returns how many of its batches count as done from now on.
        """
        return batches

    def keep_rest(self) -> None:  # noqa: B027
        """The next `open` is for the rest of the epoch under way, in its order."""

    def begin_window(self) -> None:  # noqa: B027
        """Notes the position before a window's batches are fetched."""

    def rewind(self) -> None:  # noqa: B027
        """Back to the noted position."""

    @abstractmethod
    def cursor(self, epoch: int, batches: int) -> Cursor:
        """The position after some batches of an epoch; 0 for the beginning of one."""

    def samples_of(self, epoch: int, batches: int, *, num_batches: int) -> list[list[Any]]:
        """Returns the samples of some batches: indices, or positions in a stream; empty where they are not known.

        `batches` are those of the epoch before the first one; of a stream, near the window that was begun last.
        """
        return []

    def note_samples(self) -> Callable[[], list[Any]]:
        """Keeps the samples of each batch from now on.

        Returns what is called once for each batch that goes to training, after `advance`, and returns its samples as
        its order has them; empty if they are not known.
        """
        return list

    def state(self) -> State | None:
        """Returns what a checkpoint keeps beside the cursor, by the kind of position; None: nothing."""
        return None

    def check_resume(self, cursor: Cursor, *, before: WindowSize, now: WindowSize, dataset: DatasetLike) -> str:
        """Checks that a run with steps of size `now` can resume at a position that steps of size `before` reached.

        Returns what to say of the order of samples; empty where it stays. An epoch that was begun in another kind of
        order is finished in that order. Raises CheckpointError where the position is counted in batches of another
        size, and DataError where the number of samples changed, or their order cannot be made again.
        """
        here = self.cursor(cursor.epoch + 1, 0)
        assert here.order is not None
        is_same = cursor.samples == 0 or cursor.order is None or is_same_order(cursor.order, here.order)
        counts = is_same or here.unit is None  # groups that are formed otherwise may be more or fewer
        check_same_data(cursor, here.num_samples if counts else None, here.unit)
        if cursor.samples > 0 and cursor.order is None:
            number = cursor.epoch + 1
            return f"an older checkpoint, which does not name its order: epoch {number} is finished in this run's"
        return "" if is_same else self._finish_order(cursor, here.order, dataset)

    def _finish_order(self, cursor: Cursor, now: OrderKind, dataset: DatasetLike) -> str:
        """Finishes the cursor's epoch in another kind of order than the one of this run; says so."""
        raise_another_order(cursor, now)

    @abstractmethod
    def resume(self, cursor: Cursor, state: State) -> int:
        """The next epoch begins at a checkpoint's position; returns how many batches of it count as done."""

    @abstractmethod
    def batches_left(self, cursor: Cursor, batches_per_epoch: int) -> int:
        """Batches of the cursor's epoch that are still to be trained."""


class IndexedPosition(LoaderPosition):
    """A position in an order of indices, computed from the number of batches."""

    def __init__(self, dataloader: DataLoaderLike, batches: EpochBatches) -> None:
        self._dataloader = dataloader
        self._batches = batches
        self._moved = (-1, 0)  # an epoch, and by how many samples its batches are moved
        self._announced: tuple[set[Sample], int] = (set(), 0)  # arguments of the next `leave_out`
        # Where samples were left out last: an epoch, its batches until then, and the samples of those of the last step.
        self._since = (-1, 0)
        self._past: list[list[Any]] = []
        self.chunk: int = batches.share.chunk_size
        self.num_left_out = batches.num_left_out

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
        if self._batches.fetched is not None:
            self._batches.fetched.clear()
        order = self._batches.order_of(self._batches.epoch)
        can_repeat = order.is_permutation or order.samples_per_epoch is not None
        self._batches.ahead = None if can_repeat else collections.deque()
        batches = host_batches(self._dataloader)
        if resumes and self._dataloader.num_workers == 0:  # workers have been given their first batches by now
            self._batches.draw()
        return batches

    def advance(self, *, is_last: bool) -> None:
        if self._batches.ahead is not None:
            self._batches.ahead.popleft()

    def keep_rest(self) -> None:
        self._batches.keep_rest()

    def note_samples(self) -> Callable[[], list[Any]]:
        self._batches.fetched = collections.deque()
        return self._batches.fetched.popleft

    def leave_out(self, samples: set[Sample], num_samples: int) -> None:
        indices = {sample for sample in samples if isinstance(sample, int)}
        if len(indices) < len(samples):
            raise DataError(f"The training dataset has indices: name the samples of {QUARANTINE_NAME} by them.")
        self._batches.leave_out(indices, num_samples)
        self.num_left_out = self._batches.num_left_out

    def leave_out_later(self, samples: set[Sample], num_samples: int) -> None:
        if self._batches.order.samples_per_epoch is not None:  # shares, which others keep in their places
            self.leave_out(samples, num_samples)
            return
        before = self._batches.left_out
        self.leave_out(samples, num_samples)  # raises what it raises
        self._announced, self.is_stale = (samples, num_samples), self._batches.left_out != before
        self.leave_out(set(before), num_samples)

    def refresh(self, epoch: int, batches: int, *, window: int) -> int:
        if not self.is_stale:
            return batches
        cursor, first = self.cursor(epoch, batches), batches - window
        past = self.samples_of(epoch, first, num_batches=window) if first >= 0 else []
        self.leave_out(*self._announced)
        self.is_stale = False
        done = self.resume(cursor, {}) if batches > 0 else 0
        self._since, self._past = (epoch, done), past
        return done

    def cursor(self, epoch: int, batches: int) -> Cursor:
        order = self._batches.order_of(epoch)
        return Cursor(
            epoch=epoch,
            samples=self.samples_before(epoch, batches),
            seed=order.seed,
            num_samples=len(order),
            unit=order.unit,
            chunk=self.chunk,
            order=order.describe(),
        )

    def samples_of(self, epoch: int, batches: int, *, num_batches: int) -> list[list[Any]]:
        if (epoch, batches) < self._since:  # others were left out then
            return self._past if (epoch, batches + num_batches) == self._since else []
        found = self._batches.indices_of(epoch, self.samples_before(epoch, batches), num_batches)
        return [[index for one in batch for index in (one if isinstance(one, list) else [one])] for batch in found]

    def check_resume(self, cursor: Cursor, *, before: WindowSize, now: WindowSize, dataset: DatasetLike) -> str:
        note = self._batches.order.continue_from(cursor)
        return note or super().check_resume(cursor, before=before, now=now, dataset=dataset)

    def _finish_order(self, cursor: Cursor, now: OrderKind, dataset: DatasetLike) -> str:
        num_samples = len(self._batches.order)
        order = order_of_checkpoint(cursor, now, num_samples=num_samples, dataset=dataset)
        self._batches.finish(cursor.epoch, order)
        return f"epoch {cursor.epoch + 1} is finished in the order it was begun in, the new order begins after it"

    def resume(self, cursor: Cursor, state: State) -> int:
        order = self._batches.order
        if order.seed is not None and cursor.seed is not None:
            order.seed = cursor.seed
        batches = len(self._batches) - self._batches.num_batches(cursor.samples, cursor.epoch)
        self._moved = (cursor.epoch, self._batches.num_kept(cursor.epoch, cursor.samples) - batches * self.chunk)
        return batches

    def batches_left(self, cursor: Cursor, batches_per_epoch: int) -> int:
        return self._batches.num_batches(cursor.samples, cursor.epoch)

    def samples_before(self, epoch: int, batches: int) -> int:
        """Samples of an epoch before a batch. Batches lie otherwise in an epoch that was begun with another size."""
        num_kept = batches * self.chunk + (self._moved[1] if epoch == self._moved[0] else 0)
        return self._batches.place_after(epoch, num_kept)


class StreamPosition(LoaderPosition):
    """A position in a stream, followed by the origins of its batches."""

    def __init__(self, dataloader: StreamDataLoader) -> None:
        self._dataloader = dataloader
        self._items = dataloader.items
        # After the batch given last, and at the beginning of the window.
        self._progress = self._before = EpochProgress()
        self._ahead = dataloader.origin  # of the batch that is fetched already
        self._given = 0  # samples of the epoch before the batch given last
        # numbers of the samples of the batches of this window and of the one before, by batch of the epoch
        self._numbers: dict[int, list[Any]] = {}
        self._numbers_before: dict[int, list[Any]] = {}
        self._left_out: list[int] | None = []  # places that this epoch leaves out; None: it leaves out by a column
        self.chunk: int = self._items.chunk_size
        self._count_left_out()

    def seek(self, epoch: int, skip_batches: int) -> None:
        items = self._items
        if epoch != items.start[0]:  # another trainer's checkpoint knows the batches only
            items.start = (epoch, EpochProgress.passed_over(skip_batches * self.chunk, items.split))
        self._progress = items.start[1].copy()
        self._progress.part, self._progress.batches = items.split.part, skip_batches
        items.set_epoch(epoch)

    def open(
        self,
        skip_batches: int,
        *,
        resumes: bool,
        reset: Callable[[], None],
        before_last_skipped: Callable[[], None] | None = None,
    ) -> Iterator[Batch]:
        self._note_left_out()
        return host_batches(self._dataloader)

    def leave_out(self, samples: set[Sample], num_samples: int) -> None:
        items = self._items
        if items.former is not None:
            raise DataError(
                "Batches of a stream that are formed by length leave out no samples. Leave them out of the stream "
                f"itself, and delete {QUARANTINE_NAME} in output_dir."
            )
        has_places = items.split.is_whole and not is_shuffled_stream(items.source)
        if not has_places and any(isinstance(sample, int) for sample in samples):
            raise DataError(NO_PLACES)
        items.left_out = frozenset(samples)
        self._count_left_out()
        if self._dataloader.num_workers == 0:
            self._note_left_out()
        else:
            self._dataloader._iterator = None  # workers that persist would keep what they left out before

    def _count_left_out(self) -> None:
        if self._items.is_counted and has_length(self._items):
            self.num_left_out = len(self._items.source) - len(self._items)

    def _note_left_out(self) -> None:
        places = sorted(one for one in self._items.left_out if isinstance(one, int))
        self._left_out = places if len(places) == len(self._items.left_out) else None

    def begin(self) -> None:
        self._ahead = self._dataloader.origin

    def advance(self, *, is_last: bool) -> None:
        origin, self._ahead = self._ahead, self._dataloader.origin
        assert origin is not None
        self._given = self._progress.samples
        if origin.samples:
            self._numbers[self._progress.batches] = origin.samples
        self._progress.add(origin)
        self.num_formed += (origin.num_samples or 0) * self._items.split.num_parts

    def begin_window(self) -> None:
        self._before = self._progress.copy()
        self._numbers_before, self._numbers = self._numbers, {}

    def rewind(self) -> None:
        self._progress = self._before

    def cursor(self, epoch: int, batches: int) -> Cursor:
        items, samples = self._items, self._progress.samples if batches > 0 else 0
        return Cursor(
            epoch=epoch,
            samples=samples,
            seed=items.seed,
            num_samples=len(items.source) if items.is_counted and has_length(items) else None,
            unit=self._unit,
            # Parts of a stream end one after the other, and some are left out, so the samples do not tell the batches.
            batches=self._progress.batches if samples and not (items.split.is_whole and not items.left_out) else None,
            chunk=self.chunk,
            order={"kind": "stream", **({} if items.former is None else items.former.describe())},
        )

    def samples_of(self, epoch: int, batches: int, *, num_batches: int) -> list[list[Any]]:
        if is_mixture_stream(self._items.source):
            known = self._numbers_before | self._numbers
            found = [known.get(one, []) for one in range(batches, batches + num_batches)]
            return [] if is_shuffled_stream(self._items.source) or not all(found) else found
        ahead, left_out = (batches - self._before.batches) * self.chunk, self._left_out
        is_past = ahead < 0 and bool(left_out)  # others may have been left out then
        if self._items.former is not None or not self._items.split.is_whole or left_out is None or is_past:
            return []
        first, end = self._before.samples + ahead, self._progress.samples
        if left_out:
            kept = [place for place in range(self._before.samples, end) if place not in left_out][ahead:]
            return [kept[i : i + self.chunk] for i in range(0, num_batches * self.chunk, self.chunk)]
        starts = range(first, first + num_batches * self.chunk, self.chunk)
        return [list(range(start, min(start + self.chunk, end))) for start in starts]

    def note_samples(self) -> Callable[[], list[Any]]:
        return self._places_given

    def _places_given(self) -> list[int]:
        items, left_out = self._items, self._left_out
        if is_mixture_stream(items.source):
            return self._numbers.get(self._progress.batches - 1, [])
        if items.former is not None or not items.split.is_whole or left_out is None or is_shuffled_stream(items.source):
            return []
        places = [one for one in range(self._given, self._progress.samples) if one not in left_out]
        part = items.share.part(len(places))
        return places[part.start : part.stop]

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
        if self.num_left_out:
            rest = range(cursor.samples, len(self._items.source))
            left = len(rest) - sum(place in rest for place in self._items.left_out)
            return len(self._dataloader) - self._items.share.num_batches(left, drop_last=self._items.drop_last)
        if cursor.batches is not None and cursor.chunk == self.chunk:
            return cursor.batches
        return -(-cursor.samples // self.chunk)

    @property
    def _unit(self) -> str | None:
        items = self._items
        unit = None if items.former is None else items.former.unit
        if items.split.is_whole:
            return unit
        return f"{unit or 'single samples'}, of {items.split.num_parts} parts read by a process each"


class ForeignPosition(LoaderPosition):
    """A position in a dataloader that the user made, in batches; with its own state where it tells one."""

    def __init__(self, dataloader: DataLoaderLike) -> None:
        self._dataloader = dataloader
        inside = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's wrappers always have the methods
        self._tells = all(callable(getattr(inside, name, None)) for name in ("state_dict", "load_state_dict"))
        # The dataloader's state after the batch given last, after the one fetched already, and before the window.
        self._state: State | None = None
        self._ahead: State | None = None
        self._at_window: State | None = None
        self._resumed: State | None = None  # a checkpoint's state, from which the next iteration begins; used once
        self.may_fetch_ahead = type(dataloader) is not DataLoader and not self._tells  # as those of accelerate

    def seek(self, epoch: int, skip_batches: int) -> None:
        batches = getattr(self._dataloader, "batch_sampler", None)
        inside = getattr(batches, "batch_sampler", None)  # of accelerate's wrapper, for one of several processes
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
        state, self._resumed = self._resumed, None
        batches: Iterator[Batch]
        if state is None:
            batches = iter(self._dataloader)
            if skip_batches > 0:  # what is trained is read again
                collections.deque(itertools.islice(batches, skip_batches - 1), maxlen=0)
                if before_last_skipped is not None:
                    before_last_skipped()
                next(batches, None)
            return batches
        self._dataloader.load_state_dict(state)
        batches = iter(self._dataloader)
        if skip_batches == 0:  # an iterator of the epoch that had ended was made first
            reset()
            torch.empty((), dtype=torch.int64).random_()  # the seed that making one draws
        return batches

    def begin(self) -> None:
        self._ahead = self._state_now()

    def advance(self, *, is_last: bool) -> None:
        now = self._state_now()  # after the last batch: it begins its next epoch
        self._state, self._ahead = now if is_last else self._ahead, now

    def begin_window(self) -> None:
        self._at_window = self._state

    def rewind(self) -> None:
        self._state = self._at_window

    def _state_now(self) -> State | None:
        if not self._tells:
            return None
        state: State = copy.deepcopy(self._dataloader.state_dict())  # it may be the very object that changes
        return state

    def cursor(self, epoch: int, batches: int) -> Cursor:
        return Cursor(epoch=epoch, samples=batches, order={"kind": "dataloader"})

    def state(self) -> State | None:
        return None if self._state is None else {"dataloader": self._state}

    def check_resume(self, cursor: Cursor, *, before: WindowSize, now: WindowSize, dataset: DatasetLike) -> str:
        if before != now:
            raise CheckpointError(
                f"The checkpoint was written with steps of {before} samples, and this run has {now}. The training "
                "dataloader is not one of the trainer's, so the position is known in batches only; resume with the "
                "same per_device_train_batch_size, gradient_accumulation_steps and number of processes."
            )
        return super().check_resume(cursor, before=before, now=now, dataset=dataset)

    def resume(self, cursor: Cursor, state: State) -> int:
        self._resumed = state.get("dataloader") if self._tells else None
        return cursor.samples

    def batches_left(self, cursor: Cursor, batches_per_epoch: int) -> int:
        return batches_per_epoch - cursor.samples


def position_of(dataloader: DataLoaderLike) -> LoaderPosition:
    """The kind of position that a dataloader has."""
    batches = getattr(dataloader, "batch_sampler", None)
    if isinstance(batches, EpochBatches):
        return IndexedPosition(dataloader, batches)
    if isinstance(getattr(dataloader, "dataset", None), IterableDataset):
        from trainwright.data.streaming.reader import StreamDataLoader

        if isinstance(dataloader, StreamDataLoader):
            return StreamPosition(dataloader)
    return ForeignPosition(dataloader)
