"""The data that the laws are held against: one row for each kind of dataset that a loader reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info

from trainwright.capabilities.packing.plan import RowPlan
from trainwright.capabilities.token_budget.plan import BudgetPlan
from trainwright.checkpoint import rng
from trainwright.config.plans import Batching, LoaderPlan, SamplingPlan
from trainwright.data.dataloader import build_dataloader
from trainwright.data.loader import Loader
from trainwright.data.streaming.lookahead_buffer import BatchFormer

SIZE = 29  # shares with no batch size a divisor, so that every epoch has a tail


def item(i: int) -> dict[str, Any]:
    return {"id": i, "input_ids": [i] * (1 + i * 7 % 11)}


def items() -> list[dict[str, Any]]:
    return [item(i) for i in range(SIZE)]


class Plain(IterableDataset[dict[str, Any]]):
    """Shuffles itself with the generator that is seeded for each epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(item, torch.randperm(SIZE, generator=self.generator).tolist())


class SharesItself(IterableDataset[dict[str, Any]]):
    """Gives each worker a part of its own, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from map(item, range(first, SIZE, step))


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[[], Any]
    shared_by_workers: bool = False  # each of them reads items of its own
    former: BatchFormer | None = None

    def loader(self, *, batch_size: int = 3, workers: int = 0, rank: int = 0, num_processes: int = 1) -> Loader:
        dataset = self.make()
        sampler = self.former if isinstance(dataset, IterableDataset) else RandomSampler(dataset)
        plan = LoaderPlan(
            batch_size=batch_size, seed=7, workers=workers, rank=rank, num_processes=num_processes, is_training=True
        )
        dataloader = build_dataloader(dataset, plan, sampler=sampler, collate=ids)
        return Loader(dataloader, random_state=rng.capture, set_random_state=rng.restore)


def ids(samples: list[Any]) -> dict[str, Any]:
    """A batch of samples or of rows of them, with a number that is drawn when it is made."""
    samples = [one for sample in samples for one in (sample if isinstance(sample, list) else [sample])]
    return {"id": [sample["id"] for sample in samples], "drawn": torch.rand(())}


def columns() -> Any:
    return datasets.Dataset.from_list(items())


def hf_stream() -> Any:
    return columns().to_iterable_dataset(num_shards=4)


def hf_stream_shuffled() -> Any:
    return hf_stream().shuffle(seed=5, buffer_size=7)


def former(batching: Batching) -> BatchFormer:
    """With look-aheads so short that an epoch has several, and blocks that none of them is a multiple of."""
    plan = SamplingPlan(strategy="random", batch_size=1, micro_batches=1, num_processes=1, seed=0, batching=batching)
    return BatchFormer(plan, size=8, min_batches=3, block=3)


BUDGET = former(BudgetPlan(text="budget", max_tokens=22))
ROWS = former(RowPlan(text="rows", row_length=16))
KINDS = [
    Kind("list", items),
    Kind("columns", columns),
    Kind("hf-stream", hf_stream, shared_by_workers=True),
    Kind("hf-stream-shuffled", hf_stream_shuffled, shared_by_workers=True),
    Kind("iterable", Plain),
    Kind("iterable-in-parts", SharesItself, shared_by_workers=True),
    Kind("hf-stream, budget", hf_stream, shared_by_workers=True, former=BUDGET),
    Kind("hf-stream-shuffled, packed", hf_stream_shuffled, shared_by_workers=True, former=ROWS),
    Kind("iterable, budget", Plain, former=BUDGET),
    Kind("iterable, packed", Plain, former=ROWS),
    Kind("iterable-in-parts, packed", SharesItself, shared_by_workers=True, former=ROWS),
]
