"""Ids of the samples of a batch, and the ids in a process's part of a batch that is split over processes.

A sample's id is its number in the training data: an index of a dataset, or the position in a stream of fixed order; a
`SourceStream` has its own numbering (`find_source`). The ids of a batch's samples accompany the batch, in the order of
its rows. They come from the place where the batch was made: for a map-style dataset, they are the indices sent for
fetching; for a stream, the numbers counted by the reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainwright.data.shards import RankShare


def dispatched_parts(batches: Iterator[list[Any]], share: RankShare) -> Iterator[list[Any]]:
    """Yields one process's part of batches that the main process reads for all, cut like accelerate's dispatcher does.

    A last batch that does not divide evenly is filled with the first samples of the first batch. Any: ids, or rows.
    """
    num = share.num_processes
    first: list[Any] = []
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        first = first or batch[:num]
        size, rest = divmod(len(batch), num)
        if following is None and rest:
            batch = batch + first
            size += 1
        yield batch[share.rank * size : (share.rank + 1) * size]
        batch = following
