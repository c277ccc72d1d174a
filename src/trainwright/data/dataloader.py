"""Builds torch's DataLoader from a dataset and a plan, over indices or over a stream, and starts its workers."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from trainwright._types import Batch, DatasetLike, Item, tail_batch
from trainwright.config.plans import LoaderPlan
from trainwright.data.bad_sample import Pipe, name_worker_samples
from trainwright.data.batches import EpochBatches, Mark, MarksSeed, marks_epoch
from trainwright.data.collator_layers import innermost
from trainwright.data.columns import DatasetWithExtras
from trainwright.data.length_sampler import BatchOrder, SingleBatchCollator
from trainwright.data.order import Exclusion, Order
from trainwright.data.prepared_dataloader import PreparedDataLoader, Reading
from trainwright.data.sampler_factory import order_by
from trainwright.data.seeding import SeededCollator, SeededItems, seed_worker
from trainwright.data.shards import ChunkPart, RankShare
from trainwright.data.worker_internals import show_dataset
from trainwright.state.interrupts import leave_signals_to_parent

if TYPE_CHECKING:
    from trainwright.data.streaming.lookahead_buffer import BatchFormer
    from trainwright.data.streaming.reader import RankExchange, StreamDataLoader

# Any: datasets and samplers are the user's own types.
Collate = Callable[[list[Item]], Batch]
POLL_S = 1.0  # interval at which a worker checks for the main process
GRACE_S = 0.5  # time for children to end by themselves when the process does


def build_dataloader(
    dataset: DatasetLike, plan: LoaderPlan, *, sampler: Any, collate: Collate, exchange: RankExchange | None = None
) -> PreparedDataLoader:
    """Builds a DataLoader; the order comes from the sampler, or from the dataset itself if it is a stream.

    The sampler yields indices or groups of indices; for a stream, it is a `BatchFormer` of its samples, or None.
    `exchange` communicates between processes that each have their own part of a stream. Raises DataError for a stream
    that was split for other processes, and for a sampler of batches.
    """
    if isinstance(dataset, IterableDataset):
        dataloader: PreparedDataLoader = _stream_dataloader(dataset, plan, sampler, collate, exchange)
    else:
        dataloader = _indexed_dataloader(dataset, plan, sampler, collate)
    dataloader.total_batch_size = plan.batch_size * plan.num_processes
    return dataloader


def build_whole(dataset: DatasetLike, plan: LoaderPlan, *, sampler: Any, collate: Collate) -> PreparedDataLoader:
    """Builds a DataLoader of the batches of all processes together, for one process that reads for the others."""
    whole = replace(plan, batch_size=plan.batch_size * plan.num_processes, rank=0, num_processes=1)
    if isinstance(dataset, IterableDataset):
        from trainwright.data.streaming.stream_state import check_is_whole

        check_is_whole(dataset, plan.num_processes, purpose="dispatch_batches")
        dataloader = PreparedDataLoader(
            dataset, batch_size=whole.batch_size, drop_last=whole.drop_last, collate_fn=collate, **_options(whole)
        )
        dataloader.reading = _reading(dataset, collate, whole)
        return dataloader
    return build_dataloader(dataset, whole, sampler=sampler, collate=collate)


def _stream_dataloader(
    dataset: DatasetLike, plan: LoaderPlan, batcher: BatchFormer | None, collate: Collate, exchange: RankExchange | None
) -> StreamDataLoader:
    from trainwright.data.streaming.reader import StreamDataLoader, StreamItems, WithOrigin
    from trainwright.data.streaming.stream_state import WHOLE, check_is_whole, split_for

    share = _share(plan)
    split = WHOLE
    if plan.is_training and exchange is not None:
        split = split_for(dataset, rank=plan.rank, num_processes=plan.num_processes)
    else:
        check_is_whole(dataset, plan.num_processes, purpose="an evaluation")
    if not split.is_whole:
        share = RankShare(batch_size=plan.batch_size)
    items = StreamItems(
        dataset,
        share if batcher is None else replace(share, batch_size=1),
        drop_last=plan.drop_last and plan.behaviour.drop_last_applies_to_streams,
        seed=plan.seed,
        seeds_always=plan.seed_samples,
        batcher=batcher,
        split=split,
        must_reach_start=plan.behaviour.resumed_stream_must_reach_position,
        seeds_workers=plan.behaviour.sends_seed_and_epoch_to_workers,
    )
    between = None if split.is_whole else exchange
    dataloader = StreamDataLoader(items, collate=innermost(collate), exchange=between, **_options(plan))
    dataloader.reading = _reading(items, WithOrigin(collate), plan)
    return dataloader


def _indexed_dataloader(dataset: DatasetLike, plan: LoaderPlan, sampler: Any, collate: Collate) -> PreparedDataLoader:
    # Workers of an evaluation that do not persist are started anew, with a seed drawn for it.
    is_seeded = plan.is_training or plan.persistent_workers
    seeds_workers = plan.workers > 0 and is_seeded and plan.behaviour.sends_seed_and_epoch_to_workers
    share = _share(plan)
    drop_last = plan.drop_last
    rows = dataset
    if isinstance(sampler, BatchOrder):  # its unit is already a batch, and it drops incomplete ones itself
        order: Order = sampler.for_all_processes()
        drop_last = False
        rows = sampler.wrap(dataset)
        share = replace(share, batch_size=1)
        collate = SingleBatchCollator(collate)
    else:
        order = order_by(sampler, dataset, plan)
    mark: Mark | None = None
    if plan.seed_samples:
        mark = marks_epoch
        rows = SeededItems(rows, plan.seed)
        collate = SeededCollator(collate)
    elif seeds_workers:
        mark = MarksSeed(plan.seed, share, has_epochs=plan.is_training)
    batches = EpochBatches(order, share.batch_size, drop_last=drop_last, share=share, mark=mark)
    may_lose_samples = plan.is_training and order.exclusion is Exclusion.SMALLER_BATCHES
    is_shared = plan.num_processes > 1 or may_lose_samples  # there may be filler batches
    kind = RankDataLoader if is_shared else PreparedDataLoader
    shown = dataset.taken if isinstance(dataset, DatasetWithExtras) else dataset
    dataloader = kind(shown, batch_sampler=batches, collate_fn=innermost(collate), **_options(plan))
    dataloader.reading = _reading(rows, collate, plan)
    dataloader.tells_dataset = plan.is_training
    return dataloader


def _share(plan: LoaderPlan) -> RankShare:
    return RankShare(batch_size=plan.batch_size, rank=plan.rank, num_processes=plan.num_processes, even=plan.even_tail)


def _options(plan: LoaderPlan) -> dict[str, Any]:
    """Returns the keywords of torch's DataLoader besides the data, their order and the collator."""
    if plan.workers > 0:
        end_workers_at_exit()
    return {
        "num_workers": plan.workers,
        "pin_memory": plan.pin_memory,
        "persistent_workers": plan.persistent_workers and plan.workers > 0,
        "multiprocessing_context": plan.multiprocessing_context,
        "prefetch_factor": plan.prefetch_factor,
        "in_order": plan.in_order,
        "timeout": plan.timeout_s if plan.workers > 0 else 0.0,
        "worker_init_fn": partial(seed_worker, num_workers=plan.workers, rank=plan.rank) if plan.is_training else None,
    }


def _reading(rows: DatasetLike, collate: Any, plan: LoaderPlan) -> Reading:  # a collator, or a layer around one
    has_timeout = plan.workers > 0 and plan.timeout_s
    stacks = multiprocessing.Pipe(duplex=False) if has_timeout else None
    return Reading(dataset=rows, collator=collate, start_worker=partial(start_worker, stacks=stacks))


class RankDataLoader(PreparedDataLoader):
    """A dataloader over `EpochBatches`; an unevenly divided batch, such as a tail, is yielded as a `TailBatch`."""

    def host_batches(self) -> Iterator[Batch]:
        batches = self.batch_sampler
        assert isinstance(batches, EpochBatches)
        parts = batches.uneven_parts()
        fetched = super().host_batches()
        return fetched if parts is None else _with_parts(fetched, parts)


def _with_parts(fetched: Iterator[Batch], parts: dict[int, ChunkPart]) -> Iterator[Batch]:
    for number, batch in enumerate(fetched, start=1):
        part = parts.pop(number, None)
        yield batch if part is None else tail_batch(batch, num_samples=part.num_samples, weight=part.weight)


# -- workers -----------------------------------------------------------------------------------------------------------


def start_worker(
    worker_id: int, *, init: Callable[[int], None] | None, dataset: DatasetLike = None, stacks: Pipe | None = None
) -> None:
    """Prepares a new worker, which leaves signals to the main process: that still needs its batches.

    Args:
        worker_id: number of the worker.
        init: the `worker_init_fn` of the dataloader; by default it seeds the worker. None keeps torch's seed.
        dataset: the user's dataset, which `get_worker_info` then shows; None: the one that torch was given.
        stacks: the pipe to which the worker writes its stack when signalled.
    """
    leave_signals_to_parent()
    if stacks is not None and hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR2, file=stacks[1].fileno(), all_threads=False)
    main = multiprocessing.parent_process()
    if main is not None:
        threading.Thread(target=_end_with, args=(main, os.getppid()), name="trainwright-parent", daemon=True).start()
    name_worker_samples()
    if dataset is not None:
        show_dataset(dataset)
    if init is not None:
        init(worker_id)


def _end_with(main: BaseProcess, parent: int) -> None:
    """Ends this worker when the main process is gone: torch only checks for it while a worker waits for indices.

    The parent's pid is compared, since workers started later hold the pipe to `main` open.
    """
    while main.is_alive() and os.getppid() == parent:
        main.join(POLL_S)
    os._exit(1)


@cache
def end_workers_at_exit() -> None:
    """Kills workers that ignore SIGTERM when this process exits, since it would wait for them forever.

    It is registered after multiprocessing's own hook, which terminates and joins them, and so runs before it.
    """
    atexit.register(_end_children)


def _end_children() -> None:
    """Asks daemonic children to end, as multiprocessing would, and kills the rest."""
    if hasattr(signal, "SIGCHLD"):
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for the first killed worker
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline = time.monotonic() + GRACE_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
