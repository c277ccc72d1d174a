"""From a dataset and a plan to torch's DataLoader: one over indices, or one over a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from trainwright._types import Batch, Item, TailBatch
from trainwright.config.plans import LoaderPlan
from trainwright.data.batch_sampler import BatchOrder, SingleBatchCollator
from trainwright.data.prepared_dataloader import PreparedDataLoader
from trainwright.data.sampler_factory import order_by
from trainwright.data.samplers import EpochBatches, Order
from trainwright.data.seeding import SeededCollator, SeededItems
from trainwright.data.sharding import ChunkPart, RankShare
from trainwright.data.workers import end_workers_at_exit, start_worker

if TYPE_CHECKING:
    from trainwright.data.streaming.lookahead_buffer import BatchFormer
    from trainwright.data.streaming.reader import StreamDataLoader
    from trainwright.data.streaming.split_sync import RankExchange

# Any: datasets and samplers are the user's own types.
Collate = Callable[[list[Item]], Batch]


def build_dataloader(
    dataset: Any, plan: LoaderPlan, *, sampler: Any, collate: Collate, exchange: RankExchange | None = None
) -> PreparedDataLoader:
    """A DataLoader over the dataset; the order comes from the sampler, or from the dataset itself if it is a stream.

    The sampler gives indices or groups of them; for a stream it is a `BatchFormer` of its samples, or None. `exchange`
    is between processes that have parts of a stream of their own.

    Raises:
        DataError: a stream that is split for other processes, or a sampler of batches.
    """
    dataloader = (
        _stream_dataloader(dataset, plan, sampler, collate, exchange)
        if isinstance(dataset, IterableDataset)
        else _indexed_dataloader(dataset, plan, sampler, collate)
    )
    dataloader.total_batch_size = plan.batch_size * plan.num_processes
    return dataloader


def build_whole(dataset: Any, plan: LoaderPlan, *, sampler: Any, collate: Collate) -> DataLoader[Any]:
    """A DataLoader of the batches of all processes together, as one process reads them for the others."""
    whole = replace(plan, batch_size=plan.batch_size * plan.num_processes, rank=0, num_processes=1)
    if isinstance(dataset, IterableDataset):
        from trainwright.data.streaming.stream_state import check_is_whole

        check_is_whole(dataset, plan.num_processes, purpose="dispatch_batches")
        return DataLoader(
            dataset, batch_size=whole.batch_size, drop_last=whole.drop_last, collate_fn=collate, **_options(whole)
        )
    return build_dataloader(dataset, whole, sampler=sampler, collate=collate)


def _stream_dataloader(
    dataset: Any, plan: LoaderPlan, former: BatchFormer | None, collate: Collate, exchange: RankExchange | None
) -> StreamDataLoader:
    from trainwright.data.streaming.reader import StreamDataLoader, StreamItems
    from trainwright.data.streaming.stream_state import WHOLE, check_is_whole, split_for

    share, split = _share(plan), WHOLE
    if plan.is_training and exchange is not None:
        split = split_for(dataset, rank=plan.rank, num_processes=plan.num_processes)
    else:
        check_is_whole(dataset, plan.num_processes, purpose="an evaluation")
    if split.is_whole:
        exchange = None
    else:
        share = RankShare(batch_size=plan.batch_size)
    items = StreamItems(
        dataset,
        share if former is None else replace(share, batch_size=1),
        drop_last=plan.drop_last,
        seed=plan.seed,
        seeds_always=plan.seed_samples,
        former=former,
        split=split,
    )
    return StreamDataLoader(items, collate=collate, exchange=exchange, **_options(plan))


def _indexed_dataloader(dataset: Any, plan: LoaderPlan, sampler: Any, collate: Collate) -> PreparedDataLoader:
    worker_seed = plan.seed if plan.is_training and plan.workers > 0 else None
    share, drop_last = _share(plan), plan.drop_last
    if isinstance(sampler, BatchOrder):  # its unit is a batch already, and it drops what is to be dropped itself
        order: Order = sampler.of_all_processes()
        drop_last, dataset, share = False, sampler.wrap(dataset), replace(share, batch_size=1)
        collate = SingleBatchCollator(collate)
    else:
        order = order_by(sampler, dataset, plan)
    batches = EpochBatches(order, share.batch_size, drop_last=drop_last, worker_seed=worker_seed, share=share)
    if plan.seed_samples:
        batches.tells_epoch, dataset = True, SeededItems(dataset, plan.seed)
        collate = SeededCollator(collate)
    kind = RankDataLoader if plan.num_processes > 1 else PreparedDataLoader
    return kind(dataset, batch_sampler=batches, collate_fn=collate, **_options(plan))


def _share(plan: LoaderPlan) -> RankShare:
    return RankShare(batch_size=plan.batch_size, rank=plan.rank, num_processes=plan.num_processes, even=plan.even_tail)


def _options(plan: LoaderPlan) -> dict[str, Any]:
    """Returns the keywords of torch's DataLoader besides the data, their order and the collator."""
    seeds = {"num_workers": plan.workers, "rank": plan.rank} if plan.is_training else {}
    timeout_s = plan.timeout_s if plan.workers > 0 else 0.0
    if plan.workers > 0:
        end_workers_at_exit()
    return {
        "num_workers": plan.workers,
        "pin_memory": plan.pin_memory,
        "persistent_workers": plan.persistent_workers and plan.workers > 0,
        "multiprocessing_context": plan.multiprocessing_context,
        "prefetch_factor": plan.prefetch_factor,
        "in_order": plan.in_order,
        "timeout": timeout_s,
        "worker_init_fn": partial(start_worker, seeds=seeds, stacks=Pipe(duplex=False) if timeout_s else None),
    }


class RankDataLoader(PreparedDataLoader):
    """A dataloader over `EpochBatches`; a batch of a tail that is shared unevenly comes as a `TailBatch`."""

    def host_batches(self) -> Iterator[Batch]:
        batches = self.batch_sampler
        assert isinstance(batches, EpochBatches)
        num_batches, part = batches.num_batches(batches.first_sample), batches.last_part(batches.first_sample)
        fetched = super().host_batches()
        return fetched if part is None else _with_marked_end(fetched, num_batches, part)


def _with_marked_end(batches: Iterator[Batch], num_batches: int, part: ChunkPart) -> Iterator[Batch]:
    for number, batch in enumerate(batches, start=1):
        yield (batch if number < num_batches else TailBatch(batch, num_samples=part.num_samples, weight=part.weight))
