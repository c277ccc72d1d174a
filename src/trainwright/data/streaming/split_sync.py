"""Equal numbers of batches on processes that read parts of a stream of their own, weighted by their samples.

Before a batch is given out, the processes tell each other how many samples they have for it. As long as all have a full
batch, it goes out as it is. Where one has fewer, the mean over its batch counts by its share of the samples; where its
part has ended, a batch that it had before stands in and weighs nothing. When nobody has any more, the epoch is over.

These are small numbers between the processes' main memories: no device waits for them, and since batches are fetched
one ahead, they are exchanged while the step before is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

from trainwright._types import Batch
from trainwright.data.sharding import ChunkPart
from trainwright.data.streaming.stream_state import BatchOrigin, Split
from trainwright.errors import DataError

T = TypeVar("T")
NOTHING_AT_ALL = -1  # no samples, and no batch that could stand in
NOTHING_MORE: tuple[Batch | None, BatchOrigin | None] = (None, None)


class RankExchange(Protocol):
    """Collective operations between the processes; all call these at the same place."""

    def gather_counts(self, count: int) -> list[int]: ...
    def gather_objects(self, value: T) -> list[T]: ...


def equal_batches(
    fetched: Iterator[tuple[Batch, BatchOrigin]], exchange: RankExchange, split: Split, *, size: int, begins: bool
) -> Iterator[tuple[Batch, BatchOrigin]]:
    """The batches of this process's part (`split`) and those that stand in, each with the origin of the batches of all.

    A full batch has `size` samples on one process. `begins`: nothing of the epoch is trained yet; then a process
    without any sample raises DataError.
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
                _raise_empty(counts)
            # A process that resumes behind the end of its own part borrows a batch of another one.
            borrowed = next(one for one in exchange.gather_objects(batch) if one is not None)
            latest = borrowed if latest is None else latest
        given = latest if origin is None else batch
        assert given is not None
        latest = copy.copy(given)  # whoever gets it may take entries out of it
        yield given, _of_all(origin, counts, split, size)
        begins = False


def _of_all(origin: BatchOrigin | None, counts: list[int], split: Split, size: int) -> BatchOrigin:
    total = sum(count for count in counts if count > 0)
    if origin is None:
        stands_in = ChunkPart(0, 0, 0, 0.0)
        return BatchOrigin(size=total, worker=0, num_workers=1, place=None, part=stands_in)
    is_full = all(count == size for count in counts)
    part = None if is_full else ChunkPart(0, origin.size, origin.size, origin.size * split.num_parts / total)
    return replace(origin, size=total, part=part)


def _raise_empty(counts: list[int]) -> None:
    empty = ", ".join(str(rank) for rank, count in enumerate(counts) if count == NOTHING_AT_ALL)
    raise DataError(
        f"The part of the stream of process {empty} has no sample, and others have some. Split a stream with more "
        "samples or shards (num_shards), or train with fewer processes."
    )
