"""From a dataset and a plan to torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from trainwright.config.plans import LoaderPlan
from trainwright.data.batch_sampler import BatchOrder, SingleBatchCollator
from trainwright.data.feistel import LARGE, FeistelOrder
from trainwright.data.rank_dataloader import RankDataLoader
from trainwright.data.sample_seeding import SeededCollator, SeededItems
from trainwright.data.samplers import EpochBatches, Order, SamplerOrder, ShuffledOrder
from trainwright.data.sharding import RankShare
from trainwright.data.streaming.batching import BatchFormer
from trainwright.data.streaming.dataset_kinds import check_is_whole, split_for
from trainwright.data.streaming.split_sync import RankExchange
from trainwright.data.streaming.stream_dataloader import StreamDataLoader, StreamItems
from trainwright.data.worker_seeding import end_workers_at_exit, start_worker
from trainwright.errors import DataError


def build_dataloader(
    dataset: Any,
    plan: LoaderPlan,
    *,
    sampler: Any,
    collate: Callable[[list[Any]], Any],
    exchange: RankExchange | None = None,
) -> DataLoader[Any]:
    """A DataLoader over the dataset; the order comes from the sampler, or from the dataset itself if it is a stream.

    A stream's sampler may be a `BatchFormer`, which forms batches of what the dataset gives. `exchange`: between
    processes that have parts of a stream of their own.
    """
    options = _options(plan, collate)
    share = RankShare(batch_size=plan.batch_size, rank=plan.rank, num_processes=plan.num_processes, even=plan.even_tail)
    if isinstance(dataset, IterableDataset):
        split = None
        if plan.is_training and exchange is not None:
            split = split_for(dataset, rank=plan.rank, num_processes=plan.num_processes)
        else:
            check_is_whole(dataset, plan.num_processes, purpose="an evaluation")
        if split is not None:
            share = RankShare(batch_size=plan.batch_size)
        former = sampler if isinstance(sampler, BatchFormer) else None
        items = StreamItems(
            dataset,
            share if former is None else replace(share, batch_size=1),
            drop_last=plan.drop_last,
            seed=plan.seed,
            seeds_always=plan.seed_samples,
            former=former,
            split=split,
        )
        return StreamDataLoader(items, collate=options.pop("collate_fn"), exchange=exchange, **options)
    worker_seed = plan.seed if plan.is_training and plan.workers > 0 else None
    drop_last = plan.drop_last
    if isinstance(sampler, BatchOrder):  # its unit is a batch already, and it drops what is to be dropped itself
        order: Order = sampler.of_all_processes()
        drop_last, dataset, share = False, sampler.wrap(dataset), replace(share, batch_size=1)
        options["collate_fn"] = SingleBatchCollator(collate)
    else:
        order = _order(dataset, sampler, plan)
    batches = EpochBatches(order, share.batch_size, drop_last=drop_last, worker_seed=worker_seed, share=share)
    if plan.seed_samples:
        batches.tells_epoch, dataset = True, SeededItems(dataset, plan.seed)
        options["collate_fn"] = SeededCollator(options["collate_fn"])
    kind = RankDataLoader if plan.num_processes > 1 else DataLoader
    return kind(dataset, batch_sampler=batches, **options)


def build_whole(
    dataset: Any, plan: LoaderPlan, *, sampler: Any, collate: Callable[[list[Any]], Any]
) -> DataLoader[Any]:
    """A DataLoader of the batches of all processes together, as one process reads them for the others."""
    whole = replace(plan, batch_size=plan.batch_size * plan.num_processes, rank=0, num_processes=1)
    if isinstance(dataset, IterableDataset):
        check_is_whole(dataset, plan.num_processes, purpose="dispatch_batches")
        return DataLoader(dataset, batch_size=whole.batch_size, drop_last=whole.drop_last, **_options(whole, collate))
    return build_dataloader(dataset, whole, sampler=sampler, collate=collate)


def _options(plan: LoaderPlan, collate: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """What torch's DataLoader takes besides the data and their order."""
    options: dict[str, Any] = {
        "collate_fn": collate,
        "num_workers": plan.workers,
        "pin_memory": plan.pin_memory,
        "persistent_workers": plan.persistent_workers and plan.workers > 0,
        "multiprocessing_context": plan.multiprocessing_context,
        "prefetch_factor": plan.prefetch_factor,
        "in_order": plan.in_order,
    }
    seeds = {"num_workers": plan.workers, "rank": plan.rank} if plan.is_training else {}
    if plan.workers > 0:
        end_workers_at_exit()
    options["worker_init_fn"] = partial(start_worker, seeds=seeds)
    return options


def _order(dataset: Any, sampler: Any, plan: LoaderPlan) -> Order:
    if isinstance(sampler, BatchSampler):
        raise DataError(
            f"The sampler is a batch sampler ({type(sampler).__name__}), which gives whole batches, and "
            f"per_device_train_batch_size={plan.batch_size} says how large a batch is too. Return a sampler of single "
            "indices, or override get_train_dataloader and return DataLoader(dataset, batch_sampler=...)."
        )
    is_permutation = (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)
    )
    if is_permutation and plan.seeded:
        is_large = plan.shuffle_method == "auto" and len(dataset) > LARGE
        computed = plan.shuffle_method == "feistel" or is_large
        return FeistelOrder(len(dataset), plan.seed) if computed else ShuffledOrder(len(dataset), plan.seed)
    return SamplerOrder(sampler if sampler is not None else range(len(dataset)))
