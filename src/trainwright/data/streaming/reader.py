"""One pass over a stream in one process or worker: opened behind what is trained, shared with the others, seeded.

What is drawn while a stream is read or collated is seeded in workers, and in the main process where asked: as a
function of the seed, the epoch and the position. How a stream is cut is in `chunks.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch.utils.data._utils import worker as torch_worker

from trainwright.data.sharding import RankShare
from trainwright.data.streaming.batching import BatchFormer
from trainwright.data.streaming.chunks import Chunk, OpenStream, chunks_of_batches, chunks_of_items
from trainwright.data.streaming.dataset_kinds import Split, is_hf_stream, keeps_state, own_state
from trainwright.data.streaming.stream_state import BatchItems, BatchOrigin, EpochProgress, StreamPlace
from trainwright.data.worker_seeding import seed_from, seed_of
from trainwright.errors import DataError


class Stream(Protocol):
    """What is read, and how."""

    source: Any
    share: RankShare
    drop_last: bool
    seed: int
    seeds_always: bool
    former: BatchFormer | None
    split: Split | None


class StreamReader:
    """Gives the portions of this process, behind `start`.

    Args:
        info: what torch says of the worker that this is; None in the main process.
    """

    def __init__(self, stream: Stream, epoch: int, start: EpochProgress, info: Any) -> None:
        self.stream, self.epoch, self.start = stream, epoch, start
        self.worker: int = 0 if info is None else info.id
        self.num_workers: int = 1 if info is None else info.num_workers
        self.rank = stream.share.rank if stream.split is None else stream.split.rank
        self.seeds = info is not None or stream.seeds_always
        self.has_state = keeps_state(stream.source)
        self.splits_itself = self.num_workers > 1 and is_hf_stream(stream.source)
        self.watched: _WatchedInfo | None = None

    def portions(self) -> Iterator[BatchItems]:
        """Reads past what is trained now, and the portions when they are asked for."""
        opened, share = self._open(), self.stream.share
        if self.stream.former is None:
            return self._portions(chunks_of_items(opened, share, drop_last=self.stream.drop_last))
        return self._portions(chunks_of_batches(opened, share, self.stream.former, seed_of=self._order_seed))

    def _open(self) -> OpenStream:
        """Begins to read, where the dataset's own state is or at the beginning."""
        source, start = self.stream.source, self.start
        if hasattr(source, "set_epoch"):
            source.set_epoch(self.epoch)
        elif isinstance(getattr(source, "generator", None), torch.Generator):
            source.generator.manual_seed(self.stream.seed + self.epoch)
        if self.splits_itself or start.num_workers > 1:
            self._take_place()
        place = start.of_worker.get(self.worker if start.num_workers > 1 else 0, StreamPlace())
        position = 0
        if place.state is not None and self.has_state:
            source.load_state_dict(place.state)
            position = place.state_at
        return OpenStream(
            items=self._start_iterator(position),
            at=position,
            place=place,
            begin=self._seed_reading,
            state=lambda: own_state(source) if self.has_state else None,
            shows_progress=self.worker == 0 and self.rank == 0,
        )

    def _take_place(self) -> None:
        """Worker 0 makes the first batch, so it takes the place of the worker whose turn it was."""
        start = self.start
        if start.samples and start.num_workers != self.num_workers:
            self._raise_shared_otherwise()
        self.worker = (self.worker + start.next_worker) % self.num_workers
        self.splits_itself = True

    def _raise_shared_otherwise(self) -> NoReturn:
        raise DataError(
            f"The stream was shared by {self.start.num_workers} workers when the checkpoint was written, and would be "
            f"by {self.num_workers} now; each reads a part of its own. Resume with the same dataloader_num_workers."
        )

    def _start_iterator(self, position: int) -> Iterator[Any]:
        """Watches whether the dataset asks which worker this is."""
        actual: Any = torch_worker._worker_info
        if actual is not None:
            actual = getattr(actual, "actual", actual)
            self.watched = _WatchedInfo(actual, self.worker)
            torch_worker._worker_info = self.watched  # type: ignore[assignment]
        size = self.stream.share.chunk_size if self.stream.former is None else self.stream.former.block
        # At its beginning a stream may draw an order, of which each worker takes a part: they must draw the same.
        self._seed(position // size, self._whose if position > 0 else 0, 0)
        items: Iterator[Any] = iter(self.stream.source)
        if self.num_workers > 1 and self.start.samples == 0:
            first = list(itertools.islice(items, 1))  # a generator asks when it is asked for the first item
            items = itertools.chain(first, items)
            self.splits_itself = self.splits_itself or self._was_asked
        return items

    @property
    def _was_asked(self) -> bool:
        return self.watched is not None and self.watched.was_asked

    def _portions(self, chunks: Iterator[Chunk]) -> Iterator[BatchItems]:
        takes_turns = self.num_workers > 1 and not self.splits_itself
        for turn, chunk in enumerate(chunks, -self.worker):
            if takes_turns and self._was_asked:
                self._raise_shared_otherwise()
            if not takes_turns or turn % self.num_workers == 0:
                yield self._portion(chunk)

    def _portion(self, chunk: Chunk) -> BatchItems:
        share = self.stream.share
        part = share.part(chunk.length) if share.num_processes > 1 else None
        rows = BatchItems(chunk.rows(part))
        is_full = part is None or (part.weight == 1.0 and chunk.length == share.chunk_size)
        rows.origin = BatchOrigin(
            size=chunk.size,
            worker=self.worker if self.splits_itself else 0,
            num_workers=self.num_workers if self.splits_itself else 1,
            place=chunk.place,
            part=None if is_full else part,
            num_samples=chunk.num_samples,
        )
        self._seed(chunk.number, self._whose, 1 + self.rank)  # the collator may draw, on each process otherwise
        return rows

    @property
    def _whose(self) -> int:
        """A number for whose items these are: a worker's, a process's, or everybody's."""
        worker = self.worker if self.splits_itself else 0
        split = self.stream.split
        return worker if split is None else worker * split.num_parts + split.rank

    def _seed_reading(self, number: int) -> None:
        self._seed(number, self._whose, 0)

    def _seed(self, number: int, worker: int, purpose: int) -> None:
        if self.seeds:
            seed_from((self.stream.seed, self.epoch, number, worker, purpose))

    def _order_seed(self, start: int) -> int:
        return seed_of((self.stream.seed, self.epoch, start, self._whose))


class _WatchedInfo:
    """A worker's own description of itself, that tells whether it was asked for."""

    def __init__(self, actual: Any, worker: int) -> None:
        self.actual = actual
        self._worker = worker
        self.was_asked = False

    @property
    def id(self) -> int:
        self.was_asked = True
        return self._worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actual, name)
