"""Streams: an iterable dataset in batches, each item once over processes and workers, from the position of a resume.

Every process reads the same items in the same order, cuts them into chunks and takes its part of each (`share.py`), so
that all have the same number of batches. Workers share a stream in one of two ways:

- The dataset sees to it: a `datasets` stream gives each worker shards of its own, and others ask `get_worker_info`.
  Each worker then makes batches of what it gets, and the loader takes them in turn.
- It does not: every worker reads all of it and makes every W-th batch, so the batches are those without workers.

A batch tells the main process where the stream stood behind it (`Origin`); `Progress` adds up those that are trained.
A resume loads the dataset's own state where it has one, and otherwise reads past what is trained, collating nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from tqdm.auto import tqdm

from trainwright.data.share import Part, Share
from trainwright.data.stream_kinds import is_hf_stream, keeps_state
from trainwright.data.workers import seed_from
from trainwright.errors import DataError
from trainwright.types import TailBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where in a stream a batch comes from.

    Attributes:
        size: items of its chunk, over all processes.
        worker: who made it; 0 where the batches are those of a stream read without workers.
        num_workers: that take turns: 1 where the batches are those of a stream read without workers.
        state: the dataset's own state behind the chunk, if it has one.
        part: of a chunk that is not full.
    """

    size: int
    worker: int
    num_workers: int
    state: Any
    part: Part | None


class Rows(list[Any]):
    """The items of one batch on their way to the collator."""

    origin: Origin


@dataclass(slots=True, kw_only=True)
class Progress:
    """What of an epoch is trained, and what is needed to go on behind it. Plain values: it lies in checkpoints.

    Attributes:
        samples: over all processes and workers.
        num_workers: that take turns in making batches.
        next_worker: whose turn it is.
        of_worker: worker -> (samples, the dataset's state behind them).
    """

    samples: int = 0
    num_workers: int = 1
    next_worker: int = 0
    of_worker: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def add(self, origin: Origin) -> None:
        before = self.of_worker.get(origin.worker, (0, None))[0]
        self.of_worker[origin.worker] = (before + origin.size, origin.state)
        self.samples += origin.size
        self.num_workers = origin.num_workers
        self.next_worker = (origin.worker + 1) % origin.num_workers

    @classmethod
    def passed_over(cls, samples: int) -> Progress:
        """So many samples of a stream that the workers do not share, with nothing known of its state."""
        return cls(samples=samples, of_worker={0: (samples, None)} if samples else {})

    def copy(self) -> Progress:
        return Progress.from_dict(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "num_workers": self.num_workers,
            "next_worker": self.next_worker,
            "of_worker": dict(self.of_worker),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        return cls(**{**values, "of_worker": {int(k): tuple(v) for k, v in values["of_worker"].items()}})


class StreamItems(IterableDataset[Rows]):
    """The items of a stream in the portions of one process; torch's DataLoader iterates it, in workers or not.

    Args:
        source: the user's dataset.
        seed: base of the seeds of a generator that the dataset has, and of workers.
    """

    def __init__(self, source: Any, share: Share, *, drop_last: bool, seed: int, seeds_always: bool = False) -> None:
        self.source = source
        self.share = share
        self.drop_last = drop_last
        self.seed = seed
        self.seeds_always = seeds_always
        self.start = (-1, Progress())  # an epoch, and what of it is trained
        # Shared memory: workers that persist see the epoch of the main process.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """What is asked of a dataset is answered by the user's."""
        if name in ("source", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        self._epoch[0] = epoch
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Rows]:
        info: Any = get_worker_info()
        info = getattr(info, "actual", info)  # of an earlier epoch of this worker
        epoch = int(self._epoch[0])
        start = self.start[1] if epoch == self.start[0] else Progress()
        reading = _Reading(self, epoch, start, info)
        reading.open()
        return reading.rows()


class _Reading:
    """One pass over a stream in one process or worker."""

    def __init__(self, stream: StreamItems, epoch: int, start: Progress, info: Any) -> None:
        self.stream, self.epoch, self.start = stream, epoch, start
        self.worker: int = 0 if info is None else info.id
        self.num_workers: int = 1 if info is None else info.num_workers
        self.seeds = info is not None or stream.seeds_always
        self.has_state = keeps_state(stream.source)
        self.splits_itself = self.num_workers > 1 and is_hf_stream(stream.source)
        self.samples = 0  # of this worker's items, or of all
        self.watched: _WatchedInfo | None = None

    def open(self) -> None:
        """Begins to read, behind what is trained already."""
        source, start = self.stream.source, self.start
        if hasattr(source, "set_epoch"):
            source.set_epoch(self.epoch)
        elif isinstance(getattr(source, "generator", None), torch.Generator):
            source.generator.manual_seed(self.stream.seed + self.epoch)
        if self.splits_itself or start.num_workers > 1:
            self._take_place()
        trained, state = start.of_worker.get(self.worker if start.num_workers > 1 else 0, (0, None))
        self.samples = trained
        if state is not None and self.has_state:
            source.load_state_dict(state)
            trained = 0
        self._read_with_place(trained)

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

    def _read_with_place(self, trained: int) -> None:
        """Starts the iterator, watching whether the dataset asks which worker this is; passes over what is trained."""
        actual: Any = torch_worker._worker_info
        if actual is not None:
            actual = getattr(actual, "actual", actual)
            self.watched = _WatchedInfo(actual, self.worker)
            torch_worker._worker_info = self.watched  # type: ignore[assignment]
        self._seed_chunk()
        self.items = iter(self.stream.source)
        self._pass_over(trained)
        if self.num_workers > 1 and self.start.samples == 0:
            first = list(itertools.islice(self.items, 1))  # a generator asks when it is asked for the first item
            self.items = itertools.chain(first, self.items)
            self.splits_itself = self.splits_itself or self._was_asked

    @property
    def _was_asked(self) -> bool:
        return self.watched is not None and self.watched.was_asked

    def _pass_over(self, trained: int) -> None:
        """Reads what is trained already, collating nothing."""
        if trained == 0:
            return
        self.samples = 0
        chunk, shown = self.stream.share.chunk_size, self.worker == 0 and self.stream.share.rank == 0
        with tqdm(total=trained, desc="Passing over trained items", disable=not shown, leave=False, delay=2) as bar:
            while self.samples < trained:
                if self.samples > 0:
                    self._seed_chunk()
                number = sum(1 for _ in itertools.islice(self.items, min(chunk, trained - self.samples)))
                if number == 0:
                    raise DataError(
                        f"The stream gave {self.samples} items, and {trained} of them were trained when the checkpoint "
                        "was written: it has become shorter. Resume with the same data."
                    )
                self.samples += number
                bar.update(number)

    def rows(self) -> Iterator[Rows]:
        share, drop_last = self.stream.share, self.stream.drop_last
        chunk = share.chunk_size
        takes_turns = self.num_workers > 1 and not self.splits_itself
        turn = -self.worker
        while True:
            if self.samples > 0:  # before the first one the iterator was started
                self._seed_chunk()
            items = list(itertools.islice(self.items, chunk))
            if not items or (len(items) < chunk and drop_last):
                return
            if takes_turns and self._was_asked:
                self._raise_shared_otherwise()
            self.samples += len(items)
            if not takes_turns or turn % self.num_workers == 0:
                yield self._portion(items)
            turn += 1
            if len(items) < chunk:
                return

    def _portion(self, items: list[Any]) -> Rows:
        share = self.stream.share
        part = share.part(len(items)) if share.num_processes > 1 else None
        rows = Rows(items if part is None else items[part.start : part.stop])
        rows.origin = Origin(
            size=len(items),
            worker=self.worker if self.splits_itself else 0,
            num_workers=self.num_workers if self.splits_itself else 1,
            state=self.stream.source.state_dict() if self.has_state else None,
            part=None if part is None or (part.weight == 1.0 and len(items) == share.chunk_size) else part,
        )
        if self.seeds:
            self._seed(1 + share.rank)  # the collator may draw, on each process otherwise
        return rows

    def _seed_chunk(self) -> None:
        if self.seeds:
            self._seed(0)

    def _seed(self, purpose: int) -> None:
        # At its beginning a stream may draw an order, of which each worker takes a part: they must draw the same.
        worker = self.worker if self.splits_itself and self.samples > 0 else 0
        seed_from((self.stream.seed, self.epoch, self.samples // self.stream.share.chunk_size, worker, purpose))


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


class StreamDataLoader(DataLoader[Any]):
    """torch's DataLoader over `StreamItems`; `origin` says where in the stream the last batch came from."""

    origin: Origin | None = None

    def __init__(self, items: StreamItems, *, collate: Callable[[list[Any]], Any], **options: Any) -> None:
        with_origin: Any = _WithOrigin(collate)  # gets what the dataset yields, which torch types as single samples
        super().__init__(items, batch_size=None, collate_fn=with_origin, **options)

    @property
    def items(self) -> StreamItems:
        assert isinstance(self.dataset, StreamItems)
        return self.dataset

    def __len__(self) -> int:
        return self.items.share.num_batches(len(self.items.source), drop_last=self.items.drop_last)

    def __iter__(self) -> Any:
        return self._batches(super().__iter__())

    def _batches(self, fetched: Iterator[Any]) -> Iterator[Any]:
        for batch, origin in fetched:
            self.origin = origin
            part = origin.part
            yield batch if part is None else TailBatch(batch, num_samples=part.num_samples, weight=part.weight)


class _WithOrigin:
    """A collator that lets the origin of a batch pass."""

    def __init__(self, data_collator: Callable[[list[Any]], Any]) -> None:
        self.data_collator = data_collator

    def __call__(self, rows: Rows) -> tuple[Any, Origin]:
        return self.data_collator(rows), rows.origin
