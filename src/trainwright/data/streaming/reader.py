"""Streams: batches of an iterable dataset, each item once over processes and workers, from the position of a resume.

Every process reads the same items in the same order and takes its part of each chunk (`chunks.py`, `samplers.py`), so
that all have the same number of batches. Workers divide a stream in one of two ways:
- The dataset divides it: a `datasets` stream gives each worker its own shards; other datasets use `get_worker_info`,
  themselves or in a `worker_init_fn` that changes the dataset.
  Each worker then makes batches of its items, and the loader takes them in turn.
- It does not: every worker reads all of it and makes every W-th batch, so the batches are the same as without workers.

If `split_dataset_by_node` split a `datasets` stream, each process reads its own part (`equal_batches`).

A resume loads the dataset's own state if it has one, and otherwise skips the trained items without collating anything.
Random draws while reading or collating a stream are seeded in workers, and on request in the main process, as a
function of the seed, the epoch and the position.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainwright._types import Batch, DatasetLike, Item, has_length, tail_batch
from trainwright.data.collator_layers import CollatorLayer
from trainwright.data.cursor import OrderKind
from trainwright.data.prepared_dataloader import PreparedDataLoader
from trainwright.data.sample_filter import EVERY_SAMPLE, SampleFilter
from trainwright.data.seeding import derive_seed, seed_from, seed_worker
from trainwright.data.shards import ChunkPart, RankShare
from trainwright.data.sources import SourceStream
from trainwright.data.streaming.chunks import Chunk, OpenStream, chunk_batches, chunk_items
from trainwright.data.streaming.kept_items import KeptItems
from trainwright.data.streaming.lookahead_buffer import BatchFormer
from trainwright.data.streaming.stream_state import (
    WHOLE,
    BatchItems,
    BatchOrigin,
    EpochProgress,
    StreamPlace,
    StreamSplit,
    is_hf_stream,
    is_shuffled_stream,
    keeps_state,
)
from trainwright.data.worker_internals import set_worker_info
from trainwright.errors import DataError

# Any: datasets are the user's own types, and torch's description of a worker has none.
T = TypeVar("T")
NOTHING_AT_ALL = -1  # no samples, and no batch to serve as a filler
NOTHING_MORE: tuple[Batch | None, BatchOrigin | None] = (None, None)


@dataclass(eq=False, repr=False)
class StreamItems(IterableDataset[BatchItems]):
    """The items of a stream in the portions of one process; torch's DataLoader iterates it, with or without workers."""

    source: DatasetLike
    # One batch of all processes, or of one batch per process if formed by length; of this process alone if it reads
    # only a part (`split`).
    share: RankShare
    _: KW_ONLY
    drop_last: bool
    seed: int  # for workers, and for the dataset's own generator if it has one
    seeds_workers: bool = True
    seeds_always: bool = False  # also seeds the main process
    batcher: BatchFormer | None = None
    split: StreamSplit = WHOLE
    # an error if the stream ends before the start; otherwise there is simply nothing to read
    must_reach_start: bool = True

    def __post_init__(self) -> None:
        # A resume reads a look-ahead again, and random draws in it must be the same.
        self.seeds_always = self.seeds_always or self.batcher is not None
        self.start = (-1, EpochProgress())  # an epoch and its trained part
        self.sample_filter: SampleFilter = EVERY_SAMPLE
        self.is_divided = False  # the user's `worker_init_fn` gave this worker a part of its own
        # Shared memory: persistent workers see the epoch of the main process.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.source) - self.num_excluded()

    @property
    def chunk_size(self) -> int:
        """Number by which a batch of all processes advances the position."""
        return self.share.chunk_size * self.split.num_parts

    @property
    def is_counted(self) -> bool:
        """True if the number of batches follows from the number of items."""
        return self.batcher is None and self.split.is_whole

    @property
    def num_samples(self) -> int | None:
        """Items of an epoch, including excluded ones; None if they do not determine the number of batches."""
        return len(self.source) if self.is_counted and has_length(self.source) else None

    @property
    def num_missing(self) -> int:
        """Excluded items by which an epoch is shorter, if the number of items determines the number of batches."""
        return 0 if self.num_samples is None else self.num_excluded()

    def num_excluded(self, first: int = 0) -> int:
        """Returns the number of excluded positions from `first` on."""
        places = range(first, len(self.source))
        return sum(one in places for one in self.sample_filter.samples)

    def num_batches_after(self, position: int) -> int:
        """Returns the number of batches formed by the non-excluded items from a position on."""
        left = len(self.source) - position - self.num_excluded(position)
        return self.share.num_batches(left, drop_last=self.drop_last)

    @property
    def tells_batches(self) -> bool:
        """True if the number of samples before a position determines the number of batches.

        Parts of a stream end at different times, and batches span more samples if some are excluded.
        """
        return self.split.is_whole and not self.sample_filter.samples

    @property
    def has_places(self) -> bool:
        """True if a position identifies the same item in each epoch, for each process that reads the stream."""
        return self.split.is_whole and not is_shuffled_stream(self.source)

    @property
    def unit(self) -> str | None:
        """The unit of a position; None for single items of the whole stream."""
        unit = None if self.batcher is None else self.batcher.unit
        if self.split.is_whole:
            return unit
        return f"{unit or 'single samples'}, of {self.split.num_parts} parts read by a process each"

    def describe(self) -> OrderKind:
        """Returns everything that the batches depend on besides the stream, the seed and the number of processes."""
        formed = {} if self.batcher is None else self.batcher.describe()
        return {"kind": "stream", **formed}

    def exclude(self, sample_filter: SampleFilter) -> None:
        """Excludes samples; replaces an earlier selection. DataError if they cannot be identified in this way."""
        if self.batcher is not None:
            raise DataError(
                "Batches formed by length from a stream cannot exclude samples. Remove the samples from the stream "
                f"itself, and delete {sample_filter.file_name} in output_dir."
            )
        if not self.has_places:
            sample_filter.check_places()
        self.sample_filter = sample_filter

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, in the main process and in workers."""
        self._epoch[0] = epoch
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[BatchItems]:
        info: Any = get_worker_info()
        info = getattr(info, "actual", info)  # from an earlier epoch of this worker
        epoch = self.epoch
        start = self.start[1] if epoch == self.start[0] else EpochProgress()
        return StreamReader(self, epoch, start, info).portions()


class StreamDataLoader(PreparedDataLoader):
    """A dataloader over `StreamItems`; `exchange` is None if each process reads the whole stream."""

    origin: BatchOrigin | None = None  # origin in the stream of the last batch fetched

    def __init__(
        self,
        items: StreamItems,
        *,
        collate: Callable[[list[Item]], Batch],
        exchange: RankExchange | None = None,
        **options: Any,
    ) -> None:
        self.exchange = exchange
        self.items = items  # reads the dataset, from a position on
        size = items.share.batch_size if items.batcher is None else None
        drop_last = size is not None and items.drop_last
        super().__init__(items.source, batch_size=size, drop_last=drop_last, collate_fn=collate, **options)
        vars(self)["dataset"] = items.source  # torch wraps a datapipe, to serialize it

    def inside(self) -> DataLoader[Any]:
        inside = super().inside()
        vars(inside).update(batch_size=None, batch_sampler=None, drop_last=False)  # the reader makes the batches
        return inside

    def _init_in_worker(self) -> Any:  # of torch's DataLoader
        init: Any = self.worker_init_fn
        if init is None or getattr(init, "func", None) is seed_worker:
            return init
        return _WatchedInit(self.items, init)

    @property
    def num_missing(self) -> int:
        return self.items.num_excluded()

    @property
    def total_dataset_length(self) -> int:
        return len(self.items)

    @property
    def _keeps_epoch(self) -> StreamItems:
        return self.items

    def __len__(self) -> int:
        if not self.items.is_counted:
            raise TypeError("The number of batches is only known when the stream has ended.")
        num_items = len(self.items)
        return self.items.share.num_batches(num_items, drop_last=self.items.drop_last) or min(num_items, 1)

    def host_batches(self) -> Iterator[Batch]:
        fetched: Any = super().host_batches()  # with their origins
        if self.exchange is None:
            return self._batches(fetched)
        split = self.items.split
        size = self.items.share.batch_size
        begins = self.items.start[0] != self.items.epoch or self.items.start[1].samples == 0
        return self._batches(equal_batches(fetched, self.exchange, split, size=size, begins=begins))

    def _batches(self, fetched: Iterator[tuple[Batch, BatchOrigin]]) -> Iterator[Batch]:
        for batch, origin in fetched:
            self.origin = origin
            part = origin.part
            yield batch if part is None else tail_batch(batch, num_samples=part.num_samples, weight=part.weight)


class WithOrigin(CollatorLayer):
    """A collator that returns the origin of a batch along with it."""

    def __init__(self, data_collator: Callable[[list[Item]], Batch]) -> None:
        self.data_collator = data_collator

    def __call__(self, rows: BatchItems) -> tuple[Batch, BatchOrigin]:
        return self.data_collator(rows), rows.origin


class StreamReader:
    """One pass over a stream in one process or worker: starts after the trained items, divides the stream, seeds."""

    def __init__(self, stream: StreamItems, epoch: int, start: EpochProgress, info: Any) -> None:
        self.stream = stream
        self.epoch = epoch
        self.start = start
        self.worker: int = 0 if info is None else info.id
        self.num_workers: int = 1 if info is None else info.num_workers
        self.rank = stream.share.rank + stream.split.rank  # one of them is 0
        self.seeds = (info is not None and stream.seeds_workers) or stream.seeds_always
        self.has_state = keeps_state(stream.source)
        self.splits_itself = self.num_workers > 1 and (stream.is_divided or is_hf_stream(stream.source))
        self.watched: _WatchedInfo | None = None

    def portions(self) -> Iterator[BatchItems]:
        """Yields rows for the collator, one portion per batch. Skips trained items at once."""
        opened = self._open()
        share = self.stream.share
        batcher = self.stream.batcher
        if batcher is None:
            stream = self.stream
            chunks = chunk_items(opened, share, drop_last=stream.drop_last, must_reach_start=stream.must_reach_start)
            return self._portions(chunks)

        def seed(start: int) -> int:
            return derive_seed((self.stream.seed, self.epoch, start, self._whose))

        return self._portions(chunk_batches(opened, share, batcher, derive_seed=seed))

    def _open(self) -> OpenStream:
        """Starts reading at the dataset's own state, or at the beginning."""
        source = self.stream.source
        start = self.start
        if hasattr(source, "set_epoch"):
            source.set_epoch(self.epoch)
        elif isinstance(getattr(source, "generator", None), torch.Generator):
            source.generator.manual_seed(self.stream.seed + self.epoch)
        if self.splits_itself or start.num_workers > 1:
            if start.samples and start.num_workers != self.num_workers:
                self._raise_shared_otherwise()
            # Worker 0 makes the first batch, so it takes the role of the worker whose turn it was.
            self.worker = (self.worker + start.next_worker) % self.num_workers
            self.splits_itself = True
        place = start.of_worker.get(self.worker if start.num_workers > 1 else 0, StreamPlace())
        position = 0
        if place.state is not None and self.has_state:
            source.load_state_dict(place.state)
            position = place.state_at
        items = self._start_iterator(position)
        if self.splits_itself:
            self.stream.sample_filter.check_places()
        numbers_items = isinstance(source, SourceStream)
        kept = KeptItems(
            items,
            position,
            lambda: self.stream.sample_filter,
            number=source.sample if numbers_items else None,
            names_items=numbers_items or (self.stream.has_places and not self.splits_itself),
        )
        return OpenStream(
            items=kept,
            at=position,
            place=place,
            begin=lambda number: self._seed(number, self._whose, 0),
            # A copy: the dataset may return the object that it mutates.
            state=lambda: copy.deepcopy(source.state_dict()) if self.has_state else None,
            shows_progress=self.worker == 0 and self.rank == 0,
        )

    def _raise_shared_otherwise(self) -> NoReturn:
        raise DataError(
            f"The stream was divided among {self.start.num_workers} workers when the checkpoint was written, but now "
            f"among {self.num_workers}; each reads its own part. Resume with the same dataloader_num_workers."
        )

    def _start_iterator(self, position: int) -> Iterator[Item]:
        """Starts the iterator and watches whether the dataset asks for its worker id."""
        actual: Any = get_worker_info()
        if actual is not None:
            actual = getattr(actual, "actual", actual)
            self.watched = _WatchedInfo(actual, self.worker)
            set_worker_info(self.watched)
        size = self.stream.share.chunk_size if self.stream.batcher is None else self.stream.batcher.block
        # At its beginning, a stream may draw an order that workers divide: they must all draw the same.
        self._seed(position // size, self._whose if position > 0 else 0, 0)
        items: Iterator[Item] = iter(self.stream.source)
        if self.num_workers > 1 and self.start.samples == 0:
            first = list(itertools.islice(items, 1))  # a generator asks when its first item is requested
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
            size=chunk.size if self.stream.split.is_whole else chunk.length,
            worker=self.worker if self.splits_itself else 0,
            num_workers=self.num_workers if self.splits_itself else 1,
            place=chunk.place,
            part=None if is_full else part,
            num_samples=chunk.num_samples,
            samples=chunk.samples(part),
        )
        self._seed(chunk.number, self._whose, 1 + self.rank)  # the collator may draw, differently on each process
        return rows

    @property
    def _whose(self) -> int:
        """Number that identifies the reader of these items: a worker, a process, or all of them."""
        worker = self.worker if self.splits_itself else 0
        return worker * self.stream.split.num_parts + self.stream.split.rank

    def _seed(self, number: int, worker: int, purpose: int) -> None:
        if self.seeds:
            seed_from((self.stream.seed, self.epoch, number, worker, purpose))


class _WatchedInfo:
    """A worker's own description of itself that records whether it was read."""

    def __init__(self, actual: Any, worker: int) -> None:
        self.actual = actual
        self._worker = worker
        self.was_asked = False
        self.gave_dataset = False

    @property
    def id(self) -> int:
        self.was_asked = True
        return self._worker

    @property
    def dataset(self) -> Any:
        self.gave_dataset = True
        return self.actual.dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actual, name)


class _WatchedInit:
    """The user's `worker_init_fn`: one that takes the dataset from `get_worker_info` gives this worker its own part."""

    def __init__(self, items: StreamItems, init: Callable[[int], None]) -> None:
        self._items = items
        self._init = init

    def __call__(self, worker_id: int) -> None:
        actual: Any = get_worker_info()
        start = self._items.start[1]
        # As in `StreamReader`: worker 0 takes the role of the worker whose turn it was.
        worker = (worker_id + start.next_worker) % actual.num_workers if start.num_workers > 1 else worker_id
        watched = _WatchedInfo(actual, worker)
        set_worker_info(watched)
        try:
            self._init(worker)
        finally:
            set_worker_info(actual)
        self._items.is_divided = watched.gave_dataset


# -- parts of a stream of unequal length -------------------------------------------------------------------------------


class RankExchange(Protocol):
    """Collective operations between the processes; all processes must call them at the same point."""

    def gather_counts(self, count: int) -> list[int]: ...
    def gather_objects(self, value: T) -> list[T]: ...


def equal_batches(
    fetched: Iterator[tuple[Batch, BatchOrigin]], exchange: RankExchange, split: StreamSplit, *, size: int, begins: bool
) -> Iterator[tuple[Batch, BatchOrigin]]:
    """Yields the batches of this process's part (`split`), and filler batches, each with the origin over all processes.

    Before a batch is handed out, the processes exchange their number of samples for it; `size` is a full batch of one
    process. As long as all of them are full, it is passed on unchanged. If one process has fewer samples, the mean over
    its batch is weighted by its share of the samples; when its part has ended, it repeats an earlier batch as a filler
    of weight zero. When no process has samples left, the epoch is over. These are small numbers exchanged in main
    memory: no device waits for them, and since batches are fetched one ahead, the exchange overlaps with the previous
    step.

    `begins`: no part of the epoch is trained yet; then a process without any sample raises DataError.
    """
    latest: Batch | None = None
    while True:
        batch, origin = next(fetched, NOTHING_MORE)
        have_nothing = NOTHING_AT_ALL if latest is None else 0
        counts = exchange.gather_counts(have_nothing if origin is None else origin.size)
        total = sum(count for count in counts if count > 0)
        if total == 0:
            return
        if NOTHING_AT_ALL in counts:
            if begins and latest is None:
                empty = ", ".join(str(rank) for rank, count in enumerate(counts) if count == NOTHING_AT_ALL)
                raise DataError(
                    f"The part of the stream of process {empty} has no samples, but others do. Split a stream "
                    "with more samples or shards (num_shards), or train with fewer processes."
                )
            # A process that resumes after the end of its own part borrows a batch from another.
            borrowed = next(one for one in exchange.gather_objects(batch) if one is not None)
            latest = borrowed if latest is None else latest
        given = latest if origin is None else batch
        assert given is not None
        latest = copy.copy(given)  # the receiver may remove entries from it
        yield given, _join_shares(origin, counts, split, size)
        begins = False


def _join_shares(origin: BatchOrigin | None, counts: list[int], split: StreamSplit, size: int) -> BatchOrigin:
    total = sum(count for count in counts if count > 0)
    if origin is None:
        stands_in = ChunkPart(0, 0, 0, 0.0)
        return BatchOrigin(size=total, worker=0, num_workers=1, place=None, part=stands_in)
    is_full = all(count == size for count in counts)
    part = None if is_full else ChunkPart(0, origin.size, origin.size, origin.size * split.num_parts / total)
    return replace(origin, size=total, part=part)
