"""The data that the laws are held against: one row for each kind of dataset that a loader reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info

from trainwright.checkpoint import rng
from trainwright.config.plans import LoaderPlan
from trainwright.data.loader import Loader
from trainwright.data.plan import build_dataloader

SIZE = 29  # shares with no batch size a divisor, so that every epoch has a tail


def items() -> list[dict[str, Any]]:
    return [{"id": i} for i in range(SIZE)]


class Plain(IterableDataset[dict[str, Any]]):
    """Shuffles itself with the generator that is seeded for each epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"id": i} for i in torch.randperm(SIZE, generator=self.generator).tolist()])


class SharesItself(IterableDataset[dict[str, Any]]):
    """Gives each worker a part of its own, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from ({"id": i} for i in range(first, SIZE, step))


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[[], Any]

    def loader(self, *, batch_size: int = 3, workers: int = 0, rank: int = 0, num_processes: int = 1) -> Loader:
        dataset = self.make()
        sampler = None if isinstance(dataset, IterableDataset) else RandomSampler(dataset)
        plan = LoaderPlan(
            batch_size=batch_size, seed=7, workers=workers, rank=rank, num_processes=num_processes, is_training=True
        )
        dataloader = build_dataloader(dataset, plan, sampler=sampler, collate=ids)
        return Loader(dataloader, random_state=rng.capture, set_random_state=rng.restore)


def ids(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch, with a number that is drawn when it is made."""
    return {"id": [sample["id"] for sample in samples], "drawn": torch.rand(())}


def columns() -> Any:
    return datasets.Dataset.from_dict({"id": [*range(SIZE)]})


KINDS = [
    Kind("list", items),
    Kind("columns", columns),
    Kind("hf-stream", lambda: columns().to_iterable_dataset(num_shards=4)),
    Kind("hf-stream-shuffled", lambda: columns().to_iterable_dataset(num_shards=4).shuffle(seed=5, buffer_size=7)),
    Kind("iterable", Plain),
    Kind("iterable-in-parts", SharesItself),
]
