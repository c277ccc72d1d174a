"""What the order of samples costs: beside torch's DataLoader, after a resume, and for a hundred million rows.

python benchmarks/data_order.py

Three JSON lines and a table: time per batch beside a plain `torch.utils.data.DataLoader` with the same samples in one
run; seconds to the first batch after a resume at 90 % of 20,000 items that take 1 ms each to read; memory of a shuffled
order.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, RandomSampler

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from harness import Subject, Turns, Watch, measure, print_json, print_table, versions  # noqa: E402

from trainwright.checkpoint import rng  # noqa: E402
from trainwright.config.plans import LoaderPlan  # noqa: E402
from trainwright.data.batches import EpochBatches  # noqa: E402
from trainwright.data.columns import default_data_collator  # noqa: E402
from trainwright.data.dataloader import build_dataloader  # noqa: E402
from trainwright.data.loader import Loader  # noqa: E402
from trainwright.data.order import FeistelOrder  # noqa: E402

BATCH = 8
NUM_ITEMS = 20_000
READ_S = 0.001


def loader(dataset: Any, *, is_stream: bool = False) -> Loader:
    plan = LoaderPlan(batch_size=BATCH, seed=1, is_training=True)
    sampler = None if is_stream else RandomSampler(dataset)
    dataloader = build_dataloader(dataset, plan, sampler=sampler, collate=default_data_collator)
    return Loader(dataloader, random_state=rng.capture, set_random_state=rng.restore)


# -- time per batch ------------------------------------------------------------------------------------------------


def subjects(num_batches: int) -> Mapping[str, Subject]:
    items = [{"x": torch.ones(32), "labels": 1} for _ in range(num_batches * BATCH)]

    def run(batches: Iterator[Any], watch: Watch) -> None:
        for number, _ in enumerate(batches, start=1):
            watch.step_done(number)

    def plain(watch: Watch) -> None:
        run(iter(DataLoader(items, batch_size=BATCH, shuffle=True, collate_fn=default_data_collator)), watch)

    def ours(watch: Watch) -> None:
        run(loader(items).epoch(0), watch)

    return {"torch": plain, "trainwright": ours}


# -- after a resume --------------------------------------------------------------------------------------------------


class Slow:
    """Takes 1 ms to read an item."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_read += 1
        time.sleep(READ_S)
        return {"x": torch.ones(4), "labels": index}


def slow_stream() -> tuple[Any, list[int]]:
    import datasets

    reads: list[int] = []

    def read(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            for index in range(shard, shard + NUM_ITEMS // 20):
                yield {"labels": index}

    def slowly(item: dict[str, int]) -> dict[str, int]:
        reads.append(item["labels"])
        time.sleep(READ_S)
        return item

    shards = [*range(0, NUM_ITEMS, NUM_ITEMS // 20)]
    return datasets.IterableDataset.from_generator(read, gen_kwargs={"shards": shards}).map(slowly), reads


def first_batch_s(kind: str) -> dict[str, float]:
    """At 90 %: the position of a stream is found by reading up to it once, which is not timed."""
    done = NUM_ITEMS * 9 // 10 // BATCH
    if kind == "map":
        dataset: Any = Slow()
        before = loader(dataset)
        cursor = before.cursor(0, done, batches_per_epoch=done * 2)
        randomness = before.state()
    else:
        dataset, _ = slow_stream()
        before = loader(dataset, is_stream=True)
        batches = before.epoch(0)
        for _ in range(done):
            next(batches)
        cursor = before.cursor(0, done, batches_per_epoch=done * 2)
        randomness = before.state()
    fresh, reads = (Slow(), None) if kind == "map" else slow_stream()
    after = loader(fresh, is_stream=kind != "map")
    start = time.perf_counter()
    epoch, skipped = after.resume(cursor, randomness)
    next(after.epoch(epoch, skip_batches=skipped, after_first=lambda: None))
    seconds = time.perf_counter() - start
    return {"first_batch_s": round(seconds, 4), "items_read": fresh.num_read if reads is None else len(reads)}


# -- memory ----------------------------------------------------------------------------------------------------------


def order_memory(num_rows: int) -> dict[str, float]:
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    batches = EpochBatches(FeistelOrder(num_rows, 1), BATCH)
    batches.seek(0, num_rows // 2)
    indices = iter(batches)
    next(indices)
    first = time.perf_counter() - start
    peak = before
    start = time.perf_counter()
    num = 100_000
    for number in range(num):
        next(indices)
        if number % 1000 == 0:
            peak = max(peak, process.memory_info().rss)
    per_batch = (time.perf_counter() - start) / num
    return {
        "rows": num_rows,
        "peak_mb": round((peak - before) / 1e6, 1),
        "first_batch_s": round(first, 5),
        "us_per_batch": round(per_batch * 1e6, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = {"benchmark": "data_order", **versions("torch", "datasets", "trainwright")}
    turns = Turns(warm_up=50, num=args.turns, steps=200)
    per_batch = measure(subjects, base="torch", turns=turns)
    print_json({**about, "part": "per_batch", "limit": 1.05, "subjects": per_batch})
    resumes = {kind: first_batch_s(kind) for kind in ("map", "stream")}
    print_json({**about, "part": "resume", "limit_s": 0.3, **resumes})
    order = order_memory(100_000_000)
    print_json({**about, "part": "order", "limit_mb": 50, **order})
    rows = [["part", "figures"]]
    rows += [[f"a batch, {name}", f"{one['ratio']} ({one['us_per_step']} us)"] for name, one in per_batch.items()]
    rows += [[f"a resume, {kind}", ", ".join(f"{k} {v}" for k, v in one.items())] for kind, one in resumes.items()]
    rows.append(["a shuffled order", ", ".join(f"{k} {v}" for k, v in order.items())])
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
