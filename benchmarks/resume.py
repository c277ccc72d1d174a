"""The first step after a resume, at 10 %, 50 % and 90 % of an epoch of 20,000 items that take 1 ms each to read.

    python benchmarks/resume.py
    python benchmarks/resume.py --small    400 items

Each trainer resumes from its own checkpoint; `train()` stops after one step. The same `train()` from the start, with
nothing to resume, is taken away: what is left is what the position in the data and the checkpoint's files cost.
`items` are those read until the first step was done. One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import torch  # noqa: E402
from harness import print_json, print_table, silence, versions  # noqa: E402
from step_overhead import FEATURES, Mlp  # noqa: E402

LIBRARIES = ("trainwright", "transformers")
BATCH = 8
READ_S = 0.001
LIMIT_S = 0.3


class Reads:
    """How many items were read, and whether that takes its time."""

    def __init__(self) -> None:
        self.num = 0
        self.is_slow = False

    def item(self, index: int) -> dict[str, Any]:
        self.num += 1
        if self.is_slow:
            time.sleep(READ_S)
        return {"x": [float(index % 7)] * FEATURES, "labels": index % 4}


class MapDataset:
    def __init__(self, reads: Reads, num_items: int) -> None:
        self.reads = reads
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.reads.item(index)


def make_data(kind: str, reads: Reads, num_items: int) -> Any:
    if kind == "map":
        return MapDataset(reads, num_items)
    import datasets

    def indices(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            for index in range(shard, shard + num_items // 20):
                yield {"index": index}

    shards = [*range(0, num_items, num_items // 20)]
    stream = datasets.IterableDataset.from_generator(indices, gen_kwargs={"shards": shards})
    return stream.map(lambda row: reads.item(row["index"]), remove_columns=["index"])


def train(
    name: str, data: Any, folder: str, *, max_steps: int, stop_at: int | None, saves: tuple[int, ...] = (), resume: Any
) -> float:
    """Seconds from the start of `train()` to the end of its first step."""
    library = importlib.import_module(name)
    ended = []

    class Steps(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended.append(time.perf_counter())
            control.should_save = state.global_step in saves
            control.should_training_stop = state.global_step == stop_at

    args = library.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        max_steps=max_steps,
        per_device_train_batch_size=BATCH,
        logging_strategy="no",
        log_level="error",
    )
    torch.manual_seed(0)
    trainer = library.Trainer(model=Mlp(), args=args, train_dataset=data, callbacks=[Steps()])
    with silence():
        start = time.perf_counter()
        trainer.train(resume_from_checkpoint=resume)
    return ended[0] - start


def measure(name: str, kind: str, num_items: int, folder: str) -> dict[str, dict[str, float]]:
    per_epoch = num_items // BATCH
    places = {f"{percent} %": per_epoch * percent // 100 for percent in (10, 50, 90)}
    steps = tuple(places.values())
    train(
        name,
        make_data(kind, Reads(), num_items),
        folder,
        max_steps=per_epoch,
        stop_at=steps[-1],
        saves=steps,
        resume=None,
    )
    found = {}
    for place, step in places.items():
        fresh = Reads()
        reads = Reads()
        fresh.is_slow = reads.is_slow = True
        from_start = train(
            name,
            make_data(kind, fresh, num_items),
            f"{folder}/fresh-{step}",
            max_steps=per_epoch,
            stop_at=1,
            resume=None,
        )
        seconds = train(
            name,
            make_data(kind, reads, num_items),
            folder,
            max_steps=per_epoch,
            stop_at=step + 1,
            resume=f"{folder}/checkpoint-{step}",
        )
        found[place] = {
            "beside_start_s": round(seconds - from_start, 3),
            "whole_s": round(seconds, 3),
            "items": reads.num,
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="400 items")
    num_items = 400 if parser.parse_args().small else 20_000
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for kind in ("map", "stream"):
        for name in LIBRARIES:
            with tempfile.TemporaryDirectory() as folder:
                results.setdefault(kind, {})[name] = measure(name, kind, num_items, folder)
    print_json(
        {
            "benchmark": "resume",
            "items": num_items,
            "limit_s": LIMIT_S,
            "results": results,
            **versions("torch", "transformers", "datasets", "trainwright"),
        }
    )
    rows = [["data", "subject", "place", "s beside a start", "s in all", "items read", "limit"]]
    for kind, subjects in results.items():
        for name, places in subjects.items():
            for place, one in places.items():
                limit = f"{LIMIT_S}" if name == "trainwright" else ""
                rows.append([kind, name, place, *(str(value) for value in one.values()), limit])
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
