"""Chunks of a stream, of items or of batches formed by length: each becomes a batch on every process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from tqdm.auto import tqdm

from trainwright._types import Item, SampleIds
from trainwright.data.shards import ChunkPart, RankShare
from trainwright.data.streaming.kept_items import KeptItems
from trainwright.data.streaming.lookahead_buffer import BatchFormer, LookaheadBuffer, State, next_lookahead
from trainwright.data.streaming.stream_state import StreamPlace
from trainwright.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStream:
    """A stream being read."""

    items: KeptItems  # the items from here on
    at: int  # number of items before the first of these
    place: StreamPlace  # position after the trained items
    begin: Callable[[int], None]  # seeds random draws while the portion with a number is read
    state: Callable[[], State]  # returns the dataset's own state; None if it has none
    shows_progress: bool = False  # whether to show the progress of skipping

    def bar(self, stop: int) -> tqdm[NoReturn]:
        """Returns a progress bar for skipping items up to a position."""
        shown = self.shows_progress and self.at < stop
        return tqdm(
            total=max(stop - self.at, 0), desc="Skipping trained items", disable=not shown, leave=False, delay=2
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a stream that becomes a batch on every process."""

    length: int  # number of units to distribute: items, or batches if they are formed by length
    rows: Callable[[ChunkPart | None], Sequence[Item]]  # returns the collator's input for a part of them; None for all
    samples: Callable[[ChunkPart | None], SampleIds]  # returns their ids, or pieces of them; empty if they have none
    place: StreamPlace  # position after it
    size: int  # amount by which it advances the position
    number: int  # seed number for random draws in the collator
    num_samples: int | None = None  # number of samples in it, if that differs from the size


def chunk_items(
    opened: OpenStream, share: RankShare, *, drop_last: bool, must_reach_start: bool = True
) -> Iterator[Chunk]:
    """Yields chunks of `size` items that are not excluded. Skips trained items at once, and reads chunks lazily.

    A smaller last chunk is dropped with `drop_last`, unless it is the only one. Raises DataError if the stream has
    become shorter than its trained part; without `must_reach_start`, there are no chunks in that case.
    """
    size = share.chunk_size
    items = opened.items
    stop = opened.place.samples
    with opened.bar(stop) as bar:
        while (position := items.position) < stop:
            if position > 0:
                opened.begin(position // size)
            if not items.pass_over(size, stop=stop):
                if not must_reach_start:
                    break
                _raise_shorter(position, stop)
            bar.update(items.position - position)
    return _chunk_items(opened, size, drop_last=drop_last)


def _chunk_items(opened: OpenStream, size: int, *, drop_last: bool) -> Iterator[Chunk]:
    while True:
        before = position = opened.items.position
        if position > 0:  # before the first chunk, the iterator was just started
            opened.begin(position // size)
        items: list[Item] = []
        # after an error, `bad_sample.py` finds the items read so far here
        items += itertools.islice(opened.items, size)
        if not items or (len(items) < size and drop_last and position > 0):
            return
        position = opened.items.position
        state = opened.state()
        yield Chunk(
            length=len(items),
            rows=_slicer(items),
            samples=_slicer(opened.items.numbers_given()),
            place=StreamPlace(samples=position, state=state, state_at=0 if state is None else position),
            size=position - before,
            number=position // size,
        )
        if len(items) < size:
            return


def _slicer(items: Sequence[T]) -> Callable[[ChunkPart | None], Sequence[T]]:
    return lambda part: items if part is None else items[part.start : part.stop]


def chunk_batches(
    opened: OpenStream, share: RankShare, batcher: BatchFormer, *, derive_seed: Callable[[int], int]
) -> Iterator[Chunk]:
    """Yields chunks of batches formed by length. Skips trained items at once.

    `derive_seed` returns, for the start of a look-ahead, the seed for the order of its batches. Raises DataError if the
    stream has become shorter than its trained part.
    """

    def begin_block(number: int) -> State:
        if number > 0:
            opened.begin(number)
        return opened.state() if number > 0 else None

    state = opened.place.state if opened.at > 0 else None
    buffer = LookaheadBuffer(opened.items, begin_block, block=batcher.block, at=opened.at, state=state)
    start = opened.place.start
    with opened.bar(start) as bar:
        while buffer.start < start:
            size = min(batcher.block, start - buffer.start)
            if not buffer.fill(size):
                _raise_shorter(buffer.start + len(buffer), start)
            buffer.drop(size)
            bar.update(size)
    return _chunk_batches(buffer, opened.place, share.num_processes, batcher, derive_seed)


def _chunk_batches(
    buffer: LookaheadBuffer, place: StreamPlace, width: int, batcher: BatchFormer, derive_seed: Callable[[int], int]
) -> Iterator[Chunk]:
    """Yields one batch per process at a time."""
    position = place.samples
    multiple = place.multiple or width
    done = place.taken if place.multiple else place.samples  # if only the number of samples is known
    while ahead := next_lookahead(buffer, batcher, multiple=multiple, seed=derive_seed(buffer.start)):
        formed, size = ahead
        skipped = min(done, len(formed.groups))
        done -= skipped
        for first in range(skipped, len(formed.groups), width):
            last = min(first + width, len(formed.groups))
            position += width
            state_at, state = buffer.mark
            yield Chunk(
                length=last - first,
                rows=formed.batches_from(first),
                samples=formed.samples_from(first),
                place=StreamPlace(
                    samples=position, state=state, state_at=state_at, start=buffer.start, taken=last, multiple=multiple
                ),
                size=width,
                number=position,
                num_samples=formed.num_samples(first, last),
            )
        buffer.drop(size)
        multiple = width
    if done > 0:
        _raise_shorter(buffer.start, buffer.start + 1)


def _raise_shorter(given: int, trained: int) -> NoReturn:
    raise DataError(
        f"The stream has {given} items, but {trained} were trained when the checkpoint was written: it has "
        "become shorter. Resume with the same data."
    )
