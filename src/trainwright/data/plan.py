"""From a dataset and a plan to torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from trainwright.config.plans import LoaderPlan
from trainwright.data.groups import GroupOrder, OfOneGroup
from trainwright.data.samplers import EpochBatches, Order, SamplerOrder, ShuffledOrder
from trainwright.data.share import Share
from trainwright.data.shared import SharedDataLoader
from trainwright.data.workers import end_workers_at_exit, start_worker


def build_dataloader(
    dataset: Any, plan: LoaderPlan, *, sampler: Any, collate: Callable[[list[Any]], Any]
) -> DataLoader[Any]:
    """A DataLoader over the dataset; the order comes from the sampler, or from the dataset itself if it is a stream."""
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
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=plan.batch_size, drop_last=plan.drop_last, **options)
    worker_seed = plan.seed if plan.is_training and plan.workers > 0 else None
    batch_size, drop_last = plan.batch_size, plan.drop_last
    if isinstance(sampler, GroupOrder):  # its unit is a batch already, and it drops what is to be dropped itself
        order: Order = sampler.of_all_processes()
        batch_size, drop_last, dataset = 1, False, sampler.wrap(dataset)
        options["collate_fn"] = OfOneGroup(collate)
    else:
        order = _order(dataset, sampler, plan)
    share = Share(batch_size=batch_size, rank=plan.rank, num_processes=plan.num_processes, even=plan.even_tail)
    batches = EpochBatches(order, batch_size, drop_last=drop_last, worker_seed=worker_seed, share=share)
    kind = SharedDataLoader if plan.num_processes > 1 else DataLoader
    return kind(dataset, batch_sampler=batches, **options)


def _order(dataset: Any, sampler: Any, plan: LoaderPlan) -> Order:
    is_permutation = (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)
    )
    if is_permutation and plan.seeded:
        return ShuffledOrder(len(dataset), plan.seed)
    return SamplerOrder(sampler if sampler is not None else range(len(dataset)))
