"""What comes before training: the import, the constructor, the first step.

    python benchmarks/start.py            about two minutes
    python benchmarks/start.py --quick

    import      time and resident memory of `from <library> import Trainer, TrainingArguments` beside those of
                `import torch`, each in a fresh process, in turns
    first step  from the start of `train()` to the end of the first step, beside the same by hand: loader, optimizer,
                schedule, one step. All in one process that has trained before, in turns.
    constructor `Trainer(...)`, in milliseconds

One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from harness import print_json, print_table, silence, versions  # noqa: E402

LIBRARIES = ("trainwright", "transformers")
LIMITS = {"import_time": 1.1, "import_memory": 1.05, "first_step": 2.0}
LOOK = """
import json, resource, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
status = open("/proc/self/status").read()
print(json.dumps([seconds, int(status.split("VmRSS:")[1].split()[0]) * 1024]))
"""


def imported(statement: str) -> tuple[float, int]:
    """Seconds and resident bytes of an import in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", LOOK.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, size = json.loads(done.stdout.splitlines()[-1])
    return seconds, size


def imports(turns: int) -> dict[str, dict[str, float]]:
    statements = {"torch": "import torch"} | {
        name: f"from {name} import Trainer, TrainingArguments" for name in LIBRARIES
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in statements}
    for turn in range(turns + 1):
        for name, statement in statements.items():
            one = imported(statement)
            if turn:  # the first turn fills the caches of the disk
                found[name].append(one)
    base = found["torch"]
    return {
        name: {
            "ratio": round(statistics.median(a[0] / b[0] for a, b in zip(all_of_one, base, strict=True)), 2),
            "ms": round(statistics.median(one[0] for one in all_of_one) * 1e3),
            "memory_ratio": round(statistics.median(a[1] / b[1] for a, b in zip(all_of_one, base, strict=True)), 3),
            "mb": round(statistics.median(one[1] for one in all_of_one) / 1e6, 1),
        }
        for name, all_of_one in found.items()
    }


def by_hand() -> tuple[float, float]:
    import torch
    from step_overhead import BATCH, LEARNING_RATE, Mlp, vectors
    from torch import nn
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    model, items = Mlp(), vectors(256)
    start = time.perf_counter()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 10)
    batch = next(iter(DataLoader(items, batch_size=BATCH, shuffle=True, collate_fn=default_data_collator)))
    loss = model(**batch)["loss"]
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    loss.item()
    return 0.0, time.perf_counter() - start


def by_trainer(name: str) -> tuple[float, float]:
    from step_overhead import BATCH, LEARNING_RATE, Mlp, vectors

    library, ended = importlib.import_module(name), []

    class TellsTheFirst(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ended.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=1,
            per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE, log_level="error",
        )  # fmt: skip
        model, items = Mlp(), vectors(256)
        start = time.perf_counter()
        trainer = library.Trainer(model=model, args=args, train_dataset=items, callbacks=[TellsTheFirst()])
        built = time.perf_counter()
        with silence():
            trainer.train()
        return built - start, ended[0] - built


def first_steps(turns: int) -> dict[str, dict[str, float]]:
    import torch

    torch.set_num_threads(1)
    subjects: dict[str, Callable[[], tuple[float, float]]] = {"hand": by_hand}
    subjects |= {name: partial(by_trainer, name) for name in LIBRARIES}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for turn in range(turns + 2):
        for name, subject in subjects.items():
            one = subject()
            if turn > 1:
                found[name].append(one)
    base = [one[1] for one in found["hand"]]
    return {
        name: {
            "ratio": round(statistics.median(one[1] / b for one, b in zip(all_of_one, base, strict=True)), 2),
            "ms": round(statistics.median(one[1] for one in all_of_one) * 1e3, 2),
            "constructor_ms": round(statistics.median(one[0] for one in all_of_one) * 1e3, 2),
        }
        for name, all_of_one in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three turns")
    turns = 3 if parser.parse_args().quick else 9
    of_imports, of_steps = imports(turns), first_steps(3 * turns)
    print_json({"benchmark": "start", "turns": turns, "limits": LIMITS, "import": of_imports, "first_step": of_steps,
                **versions("torch", "transformers", "trainwright")})  # fmt: skip
    print_table([["import", "ratio", "ms", "memory", "MB", "limits"]] + [
        [name, *(str(value) for value in one.values()), "1.1, 1.05" if name == "trainwright" else ""]
        for name, one in of_imports.items()])  # fmt: skip
    print()
    print_table([["first step", "ratio", "ms", "constructor ms", "limit"]] + [
        [name, *(str(value) for value in one.values()), "2.0" if name == "trainwright" else ""]
        for name, one in of_steps.items()])  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
