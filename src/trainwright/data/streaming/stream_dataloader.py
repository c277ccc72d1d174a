"""Streams: an iterable dataset in batches, each item once over processes and workers, from the position of a resume.

Every process reads the same items in the same order, cuts them into chunks and takes its part of each
(`data/sharding.py`), so that all have the same number of batches. Workers share a stream in one of two ways:

- The dataset sees to it: a `datasets` stream gives each worker shards of its own, and others ask `get_worker_info`.
  Each worker then makes batches of what it gets, and the loader takes them in turn.
- It does not: every worker reads all of it and makes every W-th batch, so the batches are those without workers.

A `datasets` stream that was split by `split_dataset_by_node` is another matter: each process reads its own part, and
they agree batch by batch on when the last of them has ended (`split_sync.py`).

A batch tells the main process where the stream stood behind it (`BatchOrigin`); `EpochProgress` adds up those that are
trained. A resume loads the dataset's own state where it has one, and otherwise reads past what is trained, collating
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainwright._types import TailBatch
from trainwright.data.sharding import RankShare
from trainwright.data.streaming.batching import BatchFormer
from trainwright.data.streaming.dataset_kinds import Split
from trainwright.data.streaming.reader import StreamReader
from trainwright.data.streaming.split_sync import RankExchange, equal_batches
from trainwright.data.streaming.stream_state import BatchItems, BatchOrigin, EpochProgress


class StreamItems(IterableDataset[BatchItems]):
    """The items of a stream in the portions of one process; torch's DataLoader iterates it, in workers or not.

    Args:
        source: the user's dataset.
        share: of a batch of all processes; of as many batches as there are processes where they are formed by length.
        seed: base of the seeds of a generator that the dataset has, and of workers.
        seeds_always: also in the main process.
        former: forms batches by length.
        split: each process has a part of the stream of its own; the share is that of this process alone then.
    """

    def __init__(
        self,
        source: Any,
        share: RankShare,
        *,
        drop_last: bool,
        seed: int,
        seeds_always: bool = False,
        former: BatchFormer | None = None,
        split: Split | None = None,
    ) -> None:
        self.source = source
        self.share = share
        self.drop_last = drop_last
        self.seed = seed
        # A look-ahead is read again by a resume, and what is drawn in it must be the same then.
        self.seeds_always = seeds_always or former is not None
        self.former = former
        self.split = split
        self.start = (-1, EpochProgress())  # an epoch, and what of it is trained
        # Shared memory: workers that persist see the epoch of the main process.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """What is asked of a dataset is answered by the user's."""
        if name in ("source", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def chunk_size(self) -> int:
        """What a batch of all processes adds to the position."""
        return self.share.chunk_size * (1 if self.split is None else self.split.num_parts)

    @property
    def epoch(self) -> int:
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        self._epoch[0] = epoch
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[BatchItems]:
        info: Any = get_worker_info()
        info = getattr(info, "actual", info)  # of an earlier epoch of this worker
        epoch = self.epoch
        start = self.start[1] if epoch == self.start[0] else EpochProgress()
        return StreamReader(self, epoch, start, info).portions()


class StreamDataLoader(DataLoader[Any]):
    """torch's DataLoader over `StreamItems`; `origin` says where in the stream the last batch came from."""

    origin: BatchOrigin | None = None

    def __init__(
        self,
        items: StreamItems,
        *,
        collate: Callable[[list[Any]], Any],
        exchange: RankExchange | None = None,
        **options: Any,
    ) -> None:
        self.exchange = exchange
        with_origin: Any = _WithOrigin(collate)  # gets what the dataset yields, which torch types as single samples
        super().__init__(items, batch_size=None, collate_fn=with_origin, **options)

    @property
    def items(self) -> StreamItems:
        assert isinstance(self.dataset, StreamItems)
        return self.dataset

    def __len__(self) -> int:
        if self.items.former is not None or self.items.split is not None:
            raise TypeError("How many batches these are is known when the stream has ended.")
        return self.items.share.num_batches(len(self.items.source), drop_last=self.items.drop_last)

    def __iter__(self) -> Any:
        fetched = super().__iter__()
        if self.items.split is None or self.exchange is None:
            return self._batches(fetched)
        split, size = self.items.split, self.items.share.batch_size
        begins = self.items.start[0] != self.items.epoch or self.items.start[1].samples == 0
        return self._batches(equal_batches(fetched, self.exchange, split, size=size, begins=begins))

    def _batches(self, fetched: Iterator[Any]) -> Iterator[Any]:
        for batch, origin in fetched:
            self.origin = origin
            part = origin.part
            yield batch if part is None else TailBatch(batch, num_samples=part.num_samples, weight=part.weight)


class _WithOrigin:
    """A collator that lets the origin of a batch pass."""

    def __init__(self, data_collator: Callable[[list[Any]], Any]) -> None:
        self.data_collator = data_collator

    def __call__(self, rows: BatchItems) -> tuple[Any, BatchOrigin]:
        return self.data_collator(rows), rows.origin
