"""Ids of the samples of a batch: what they are, and which ones a batch has that was cut for several processes.

A sample's id is the number by which the training data knows it: an index of a dataset, or the place in a stream that
has one order; of a mixture with streams it is a number of its own (`MixtureStream.source_of`). A batch carries the ids
of its samples beside it, in the order of its rows. They come from where the batch was made: of a dataset with indices
they are the indices that were sent to be fetched, and of a stream the numbers that the reader counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainwright.data.shards import RankShare


def dispatched_parts(batches: Iterator[list[Any]], share: RankShare) -> Iterator[list[Any]]:
    """Yields one process's part of batches that the main process reads for all, as accelerate's dispatcher cuts them.

    A last batch that does not divide is filled up with the first samples of the first batch. Any: ids, or rows.
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
