"""RankDataLoader: the batches of one of several processes, the last of an epoch marked where it is no full one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from trainwright._types import TailBatch
from trainwright.data.samplers import EpochBatches
from trainwright.data.sharding import ChunkPart


class RankDataLoader(DataLoader[Any]):
    """torch's DataLoader over `EpochBatches`; a batch of a tail that is shared unevenly comes as a `TailBatch`."""

    def __iter__(self) -> Any:
        batches = self.batch_sampler
        assert isinstance(batches, EpochBatches)
        num_batches, part = batches.num_batches(batches.first_sample), batches.last_part(batches.first_sample)
        fetched = super().__iter__()
        return fetched if part is None else _with_marked_end(fetched, num_batches, part)


def _with_marked_end(batches: Iterator[Any], num_batches: int, part: ChunkPart) -> Iterator[Any]:
    for number, batch in enumerate(batches, start=1):
        yield (batch if number < num_batches else TailBatch(batch, num_samples=part.num_samples, weight=part.weight))
