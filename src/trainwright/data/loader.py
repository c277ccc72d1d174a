"""Loader: the batches of an epoch from any position, and the state of it that a checkpoint stores.

From the trainer's own dataloader it fetches one batch ahead of training, as the original does, so that a collator's
random draws fall between the same dropout draws. A resumed run fetches the batch that was ready when its checkpoint was
written once more; if fetching may draw random numbers in this process, their states from before that fetch are stored
for it. A signal or an error during the fetch of a window returns to the states from before its first fetch. In windows
of one micro-batch, both are the same copy, since nothing draws in between:

    step    begin_window   fetch of the batch ahead   training
    7       copy           draws                      draws; a checkpoint keeps the copy and the states of now
    8       copy           a signal: the states of the copy are put back, and step 7 is saved with the copy before it

Windows of several micro-batches have two copies, for two purposes: the other fetches of the window draw in between.
A resume could start from the first copy and fetch the window again, but only if its batches can be reproduced. A stream
stores its position after the window, not before it, and samples newly excluded change the window's own
batches.

From a user's dataloader, or any iterable, a batch is fetched when it is trained, as in a loop by hand. It may itself
fetch ahead, as accelerate's prepared dataloaders do: its ready batch was made during the previous call, and a resume
makes it while it re-reads the trained batches. The states from before that call are stored, and set before the last
skipped batch. Where such a dataloader has no length, its last batch is known only when the next one is asked for.

Map-style datasets, streams and user-made dataloaders differ in their positions (`positions.py`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainwright._types import Batch, SampleIds, has_length
from trainwright.config.plans import OPEN_END
from trainwright.data.bad_sample import name_sample, number_text
from trainwright.data.columns import draws_random_numbers, is_columnar
from trainwright.data.cursor import Cursor, LoaderState
from trainwright.data.positions import make_position
from trainwright.data.prepared_dataloader import DevicePrefetcher, PreparedDataLoader, started_in_epoch, watched
from trainwright.data.sample_filter import SampleFilter
from trainwright.data.seeding import SeededItems
from trainwright.data.shards import RankShare
from trainwright.data.sources import IndexedSources

_END: Any = object()
RandomStates = Any  # states of python, numpy and torch, as copied by `checkpoint.rng`


class FetchStates:
    """Random states around the fetches of an epoch: those that a checkpoint stores, and those to go back to.

    Args:
        copy: returns a copy of the random states of this process (python, numpy, torch).
        restore: sets them.
        keeps: fetching may draw in this process, so states from before a fetch are kept.
        rewinds: a signal returns to the beginning of a window.

    Attributes:
        now: the current states; None if something may have drawn since the last copy.
        epoch_start: those at the start of the epoch.
        before_ahead: those from before fetching the batch ahead.
        before_given: those from before fetching the last batch returned.
        before_opening: those from before the window opened an epoch.
        window_start: `now`, `before_ahead` and `before_given` at the start of the window.
    """

    def __init__(
        self,
        copy: Callable[[], RandomStates],
        restore: Callable[[RandomStates], None],
        *,
        keeps: bool,
        rewinds: bool,
    ) -> None:
        self.copy = copy
        self.restore = restore
        self.keeps = keeps
        self.rewinds = rewinds
        self.now: RandomStates | None = None
        self.epoch_start: RandomStates | None = None
        self.before_ahead: RandomStates | None = None
        self.before_given: RandomStates | None = None
        self.before_opening: RandomStates | None = None
        self.window_start: tuple[RandomStates, RandomStates | None, RandomStates | None] | None = None

    def read(self) -> RandomStates:
        """Returns the current random states, copied unless nothing can have drawn since the last copy."""
        if self.now is None:
            self.now = self.copy()
        return self.now

    def rewind(self) -> None:
        """Restores the states from the start of the window."""
        if self.window_start is not None:
            states, self.before_ahead, self.before_given = self.window_start
        elif self.before_opening is not None:
            states = self.before_opening
        else:
            return
        self.restore(states)
        self.now = None


class GivenBatches:
    """Batches returned since the start of the window.

    Attributes:
        batches: the batches.
        ids: ids of the samples of each.
        keeps_pace: every window of this epoch used exactly its own batches.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.ids: list[SampleIds] = []
        self.keeps_pace = True


class Loader:
    """Yields the batches of each epoch of a dataloader: ours, or the user's own."""

    def __init__(
        self,
        dataloader: Any,  # the user's own type
        *,
        random_state: Callable[[], RandomStates],
        set_random_state: Callable[[RandomStates], None],
        copies: DevicePrefetcher | None = None,
        window: int | None = None,
        rewinds: bool = True,
        dispatched: RankShare | None = None,
    ) -> None:
        self.dataloader = dataloader  # anything that can be iterated once per epoch
        self._copies = copies  # copies batches to the device ahead of use; None: they are moved when used
        # Micro-batches of a window; nothing draws between their fetches. The last window of an epoch may have fewer.
        # None if unknown: then a checkpoint may follow any fetch, and random numbers may be drawn before it.
        self._window = window
        self._left = window or 1  # batches remaining until a checkpoint may be written
        self._states = FetchStates(
            random_state, set_random_state, keeps=may_draw_in_this_process(dataloader), rewinds=rewinds
        )
        self._seeds_here = seeds_this_process(dataloader)
        # Position of training in it; `dispatched` is this process's part if the main process reads for all.
        self.position = make_position(dataloader, dispatched=dispatched)
        self.is_stale = False  # samples are to be excluded from the rest of the current epoch
        self.has_ended_early = False  # after the last batch of an epoch of a stream that has fewer than its length
        dataset = getattr(dataloader, "dataset", None)
        self._is_stream = isinstance(dataset, IterableDataset) or not isinstance(dataloader, DataLoader)
        self._resumed = LoaderState()
        self._is_at_rest = False  # a checkpoint's position was taken over, and its epoch is not opened yet
        self._watched = watched(dataloader)
        self._given = GivenBatches()

    def read_ids(self, batches: Sequence[Batch]) -> list[SampleIds]:
        """Returns the ids of the samples in a window's batches, in the order of their rows.

        It is called once per window, with the batches made from the ones it was given. An override of
        `get_batch_samples` may have replaced batches, read ahead or dropped some: ids are matched by the batch itself,
        or else by its position. The ids of a batch are empty if it has none, and the whole list is empty if they are
        unknown.
        """
        given = self._given
        is_as_many = len(batches) == len(given.batches)
        if is_as_many and (given.keeps_pace or all(map(operator.is_, batches, given.batches))):
            return given.ids
        given.keeps_pace = False
        pairs = list(zip(given.batches, given.ids, strict=True))
        found = [ids for batch in batches for one, ids in pairs if one is batch]
        return found if len(found) == len(batches) else []

    @property
    def has_ended(self) -> bool:
        """True if the last batch returned was the last of its epoch."""
        return self._watched.end_of_dataloader

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        """Returns attributes that callbacks and overrides read from a dataloader (`dataset`, `batch_size`, ...)."""
        if name == "dataloader":  # not set yet, during unpickling or copying
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def epoch(
        self, epoch: int, *, skip_batches: int = 0, after_first: Callable[[], None] | None = None
    ) -> Iterator[Batch]:
        """Yields the batches of an epoch (from 0), after `skip_batches` already trained ones.

        `after_first` restores the random states of an interrupted run. It is called once the first batch is fetched, if
        batches are fetched ahead, since that run had fetched it before it was interrupted; else before that fetch.
        """
        read = self._read_ahead if self.position.is_fetched_ahead else self._read_in_turn
        return read(epoch, skip_batches, after_first)

    def _read_ahead(self, epoch: int, skip_batches: int, after_first: Callable[[], None] | None) -> Iterator[Batch]:
        """Yields the batches of an epoch, each once the next one is fetched."""
        position = self.position
        states = self._states
        batches = self._open(epoch, skip_batches, resumes=after_first is not None)
        fetch: Any = self._fetch_as_it_was if self._seeds_here else next
        with self._reading(epoch):
            states.now = None
            with started_in_epoch(self.dataloader, epoch):  # persistent workers are started here
                ahead = fetch(batches, _END)
            if after_first is not None:
                after_first()
                states.now = None
            position.begin()
            length = len(self.dataloader) if has_length(self.dataloader) else None
            number = skip_batches
            while ahead is not _END:
                batch = ahead
                self._left -= 1
                if states.keeps and self._left <= 0:  # a checkpoint follows the last batch of a window
                    states.before_ahead = states.read()
                if not self._seeds_here:  # draws made for the batch are kept
                    states.now = None
                ahead = fetch(batches, _END)
                number += 1
                if is_last := ahead is _END:
                    self._watched.end_of_dataloader = True
                    self.has_ended_early = self._is_stream and length is not None and number < length
                self._given.ids.append(position.advance(is_last=is_last))
                if self._left <= 0:  # training follows
                    states.now = None
                given = batch if self._copies is None else self._copies.receive(batch)
                self._given.batches.append(given)
                yield given

    def _read_in_turn(self, epoch: int, skip_batches: int, after_first: Callable[[], None] | None) -> Iterator[Batch]:
        """Yields the batches of an epoch, each fetched when it is asked for."""
        position = self.position
        batches = self._open(epoch, skip_batches, resumes=after_first is not None)
        length = len(self.dataloader) if has_length(self.dataloader) else None
        states = self._states
        keeps_states = states.keeps and position.may_fetch_ahead
        with self._reading(epoch):
            if after_first is not None:
                after_first()
            states.now = None
            for number in itertools.count(skip_batches + 1):
                self._left -= 1
                is_before_checkpoint = keeps_states and self._left <= 0
                before = states.read() if is_before_checkpoint else None
                states.now = None
                batch = self._fetch_first(batches, epoch) if number == skip_batches + 1 else next(batches, _END)
                if batch is _END:
                    self._watched.end_of_dataloader = True
                    self.has_ended_early = self._is_stream and length is not None
                    position.end()
                    return
                if number == length:
                    self._watched.end_of_dataloader = True
                    if position.begins_anew:
                        self._read_end(batches)
                if is_before_checkpoint:
                    states.before_given = before
                self._given.ids.append(position.advance(is_last=number == length))
                given = batch if self._copies is None else self._copies.receive(batch)
                self._given.batches.append(given)
                yield given

    def _fetch_first(self, batches: Iterator[Any], epoch: int) -> Any:
        """Returns the first batch of an epoch; accelerate's dataloaders start their epoch here."""
        with started_in_epoch(self.dataloader, epoch):
            return next(batches, _END)

    def _open(self, epoch: int, skip_batches: int, *, resumes: bool) -> Iterator[Any]:
        """Opens the data of an epoch at a position."""
        self._is_at_rest = False
        self.position.seek(epoch, skip_batches)
        self._given.keeps_pace = True
        self._states.now = None
        # Opening draws the seeds of sampler and workers in this process, even if fetching draws nothing.
        self._states.before_opening = self._states.copy()
        with started_in_epoch(self.dataloader, epoch):
            batches: Iterator[Any] = self._fetch_from(skip_batches, resumes=resumes)
        return batches if self._copies is None else map(self._copies.send, batches)

    @contextmanager
    def _reading(self, epoch: int) -> Iterator[None]:
        """Wraps the reading of an epoch; an error names the sample that caused it."""
        self._watched.begin()
        self.has_ended_early = False
        try:
            yield
        except Exception as error:
            name = getattr(self.dataloader, "sample_name", number_text)
            name_sample(error, where=f"epoch {epoch} (counted from 0) of the training data", name=name)
            raise
        finally:
            self._watched.end()

    def _read_end(self, batches: Iterator[Any]) -> None:
        """Asks for the batch after the last one, which ends the pass, and draws nothing."""
        states = self._states.copy()
        next(batches, _END)
        self._states.restore(states)

    def close(self) -> None:
        """Ends persistent workers, if the dataloader is the trainer's."""
        if isinstance(self._watched, PreparedDataLoader):
            self._watched.end_workers()

    def exclude(self, sample_filter: SampleFilter, num_samples: int) -> None:
        """Excludes samples from the next step on; see `LoaderPosition.exclude` for the errors."""
        self.position.exclude_later(sample_filter, num_samples)
        self.is_stale = self.position.is_stale

    def refresh(self, epoch: int, batches: int) -> int:
        """Returns how many batches of an epoch count as done when `exclude` takes effect; see `LoaderPosition`."""
        self.is_stale = False
        return self.position.refresh(epoch, batches)

    def again(self, epoch: int, *, skip_batches: int) -> Iterator[Batch]:
        """Yields the rest of the current epoch as a resume would fetch it, ignoring batches fetched ahead."""
        self._resumed = self.state()
        now = self._states.copy()
        self.position.save_remaining()
        return self.epoch(epoch, skip_batches=skip_batches, after_first=lambda: self._states.restore(now))

    def _fetch_as_it_was(self, batches: Iterator[Batch], end: object) -> Any:
        """Returns the next batch, and restores the random states, which fetching seeds."""
        states = self._states.read()
        try:
            return next(batches, end)
        finally:
            self._states.restore(states)

    def _fetch_from(self, skip_batches: int, *, resumes: bool) -> Iterator[Batch]:
        if resumes and self._resumed.epoch_start is not None:
            self._states.restore(self._resumed.epoch_start)
        start = self._states.epoch_start = self._states.copy()
        batches = self.position.open(
            skip_batches,
            resumes=resumes,
            reset=lambda: self._states.restore(start),
            before_last_skipped=self._set_states_before_given if resumes else None,
        )
        if resumes and self._resumed.before_ahead is not None:
            self._states.restore(self._resumed.before_ahead)
        return batches

    def _set_states_before_given(self) -> None:
        """Restores the random states in which the interrupted run fetched its last trained batch, if stored."""
        if self._resumed.before_given is not None:
            self._states.restore(self._resumed.before_given)

    def begin_window(self, random_states: RandomStates | None = None) -> None:
        """Records the data position after the last finished step, before the next step's batches are fetched.

        Args:
            random_states: the current states, if the caller has copied them.
        """
        if self._copies is not None:
            self._copies.begin_window()
        self._left = 1 if self._window is None else self._window
        self._given.batches = []
        self._given.ids = []
        states = self._states
        states.before_opening = None
        states.now = random_states
        if states.keeps and (states.rewinds or random_states is not None):
            states.window_start = (states.read(), states.before_ahead, states.before_given)
        if self._window is None:
            states.now = None
        if self.position.has_mark:
            self.position.begin_window()

    def rewind(self) -> None:
        """Returns to the beginning of the window; its data will not be trained on."""
        self.position.rewind()
        self._watched.end_of_dataloader = False
        self._states.rewind()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def cursor(self, epoch: int, batches: int, *, batches_per_epoch: int) -> Cursor:
        """Returns the position after a finished step; the end of an epoch is the beginning of the next.

        `batches_per_epoch` is `OPEN_END` if unknown.
        """
        if self._is_at_rest:
            self.position.seek(epoch, batches)
        is_end = batches >= batches_per_epoch or (batches_per_epoch == OPEN_END and self.has_ended)
        return self.position.cursor(epoch + 1, 0) if is_end else self.position.cursor(epoch, batches)

    def state(self) -> LoaderState:
        """Returns the state of this process that a checkpoint stores besides the cursor.

        Before its first batch, a resumed run passes on the random states that its checkpoint had.
        """
        if self._is_at_rest:
            return replace(self._resumed, position=self.position.state() or self._resumed.position or None)
        return LoaderState(
            epoch_start=self._states.epoch_start,
            before_ahead=self._states.before_ahead,
            before_given=self._states.before_given,
            position=self.position.state(),
        )

    def resume(self, cursor: Cursor, state: LoaderState) -> tuple[int, int]:
        """Prepares to continue from a checkpoint's position and state; takes effect in the next `epoch()`.

        Returns:
            The epoch, and how many of its batches count as done: a full epoch's batches minus the remaining ones.
        """
        self._resumed = state
        self._is_at_rest = True
        return cursor.epoch, self.position.resume(cursor, state.position or {})


def may_draw_in_this_process(dataloader: object) -> bool:
    """Returns True if fetching a batch may draw random numbers in this process; unknown kinds count as drawing."""
    if not isinstance(dataloader, DataLoader):
        return True
    if dataloader.num_workers > 0:
        return False
    return draws_random_numbers(dataloader.collate_fn) or not _is_plain(dataloader.dataset)


def seeds_this_process(dataloader: Any) -> bool:
    """Returns True if fetching seeds this process's generators for each sample, so that they must be restored."""
    reading = dataloader.reading if isinstance(dataloader, PreparedDataLoader) else None
    reader = None if reading is None else reading.dataset
    seeds = isinstance(reader, SeededItems)
    if isinstance(reader, IterableDataset):
        from trainwright.data.streaming.reader import StreamItems

        seeds = isinstance(reader, StreamItems) and reader.seeds_always
    return seeds and bool(dataloader.num_workers == 0)


def _is_plain(dataset: Any) -> bool:
    """Returns True for data held in memory: a list, tensors, or Arrow columns without a transform on the fly."""
    if isinstance(dataset, IndexedSources):
        return all(map(_is_plain, dataset.sources.values()))
    if is_columnar(dataset):
        return bool(dataset.format["type"] != "custom")
    return type(dataset) in (list, tuple, TensorDataset)
