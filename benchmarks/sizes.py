"""Cost against size, each as a curve: nothing may grow faster than what it is for.

    python benchmarks/sizes.py
    python benchmarks/sizes.py --quick    without the last point of each curve

    rows         of the training set, 1e3 to 1e8: ms from the start of `train()` to the end of its first step, and MB
    log entries  1e2 to 1e6: ms to save `trainer_state.json` after ten more logs
    checkpoints  1 to 100 that are kept: ms of a save
    callbacks    0 to 50: us of a step

One JSON line, then a table. The last column is the exponent between the last two points: 0 is flat, 1 is linear.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import psutil  # noqa: E402
import torch  # noqa: E402
from harness import print_json, print_table, silence, versions  # noqa: E402
from step_overhead import FEATURES, Mlp  # noqa: E402

from trainwright import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from trainwright.state.trainer_state import TrainerState  # noqa: E402

BATCH = 8


class Rows:
    """A training set of any size: each row is the same one."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.row = {"x": torch.ones(FEATURES), "labels": 1}

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.row


class Marks(TrainerCallback):
    """When each step ended; asks for saves where told."""

    def __init__(self, saves: range = range(0)) -> None:
        self.saves = saves
        self.ends: list[float] = []
        self.saved: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        control.should_save = state.global_step in self.saves

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(time.perf_counter() - self.ends[-1])


class Listens(TrainerCallback):
    """Does nothing, at each step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


def run(folder: str, marks: Marks, *, rows: int, max_steps: int, others: int = 0, **settings: Any) -> float:
    """Trains; returns when `train()` began."""
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=max_steps,
        save_strategy="no",
        per_device_train_batch_size=BATCH,
        logging_strategy="no",
        log_level="error",
        **settings,
    )
    callbacks: list[Any] = [*(Listens() for _ in range(others)), marks]
    trainer = Trainer(model=Mlp(), args=args, train_dataset=Rows(rows), callbacks=callbacks)
    with silence():
        start = time.perf_counter()
        trainer.train()
    return start


def of_rows(num: int) -> dict[str, float]:
    process = psutil.Process()
    seconds = []
    before = process.memory_info().rss
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            marks = Marks()
            start = run(folder, marks, rows=num, max_steps=2)
            seconds.append(marks.ends[0] - start)
    return {"ms": round(min(seconds) * 1e3, 2), "mb": round((process.memory_info().rss - before) / 1e6, 1)}


def of_log_entries(num: int) -> dict[str, float]:
    state = TrainerState(log_history=[{"loss": 1 / (i + 1), "epoch": i / 1e5, "step": i} for i in range(num)])
    with tempfile.TemporaryDirectory() as folder:
        times = []
        state.save_to_json(Path(folder) / "first.json")
        for i in range(5):
            state.log_history += [{"loss": 0.1, "step": num}] * 10
            path = Path(folder) / f"{i}.json"  # as each checkpoint has a directory of its own
            start = time.perf_counter()
            state.save_to_json(path)
            times.append(time.perf_counter() - start)
    return {"ms": round(statistics.median(times) * 1e3, 2)}


def of_checkpoints(num: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        marks = Marks(saves=range(1, num + 11))
        run(folder, marks, rows=10_000, max_steps=num + 10, save_total_limit=num, save_async=False)
        return {"ms": round(statistics.median(marks.saved[-10:]) * 1e3, 2)}


def of_callbacks(num: int) -> dict[str, float]:
    found = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            marks = Marks()
            run(folder, marks, rows=10_000, max_steps=400, others=num)
            found.append((marks.ends[-1] - marks.ends[100]) / (len(marks.ends) - 101))
    return {"us": round(min(found) * 1e6, 1)}


CURVES: dict[str, tuple[Callable[[int], dict[str, float]], Sequence[int]]] = {
    "rows": (of_rows, (10**3, 10**4, 10**5, 10**6, 10**7, 10**8)),
    "log entries": (of_log_entries, (10**2, 10**3, 10**4, 10**5, 10**6)),
    "checkpoints": (of_checkpoints, (1, 10, 100)),
    "callbacks": (of_callbacks, (0, 10, 50)),
}


def exponent(curve: dict[int, dict[str, float]]) -> float:
    """Of size, by which the first figure grows between the last two points."""
    (a, one), (b, other) = list(curve.items())[-2:]
    first = next(iter(one.values()))
    last = next(iter(other.values()))
    return round(math.log(max(last, 1e-9) / max(first, 1e-9)) / math.log(b / max(a, 1)), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the last point of each curve")
    is_quick = parser.parse_args().quick
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # what only the first training of a process does
        run(folder, Marks(), rows=100, max_steps=5)
    found = {
        name: {size: measure(size) for size in (sizes[:-1] if is_quick else sizes)}
        for name, (measure, sizes) in CURVES.items()
    }
    slopes = {name: exponent(curve) for name, curve in found.items()}
    print_json({"benchmark": "sizes", "curves": found, "exponents": slopes, **versions("torch", "trainwright")})
    rows = [["of", "size", "figures", "exponent at the end"]]
    for name, curve in found.items():
        for size, figures in curve.items():
            text = ", ".join(f"{value} {unit}" for unit, value in figures.items())
            rows.append([name, f"{size:,}", text, str(slopes[name]) if size == max(curve) else ""])
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
