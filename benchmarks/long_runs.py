"""Whether a long run stays as fast and as small as it began: its logs in each checkpoint, and its steps.

    python benchmarks/long_runs.py                                    100,000 logs, 2,000 saves
    python benchmarks/long_runs.py --quick                            a tenth of both
    python benchmarks/long_runs.py --processes 1,2,4,8 --steps 100000 --save-steps 1000

Without `--processes` nothing is trained: a record gets the logs of a run, and is written at each of its saves.
`limited` is the record with `log_history_limit=1000`. The original writes the same bytes as `all`; it serializes every
log at every save, so it is measured at ten saves of equal distances, and the sum over all of them is computed.

With `--processes` a small MLP is trained by each number of processes (DDP over gloo, one thread each), with a log at
every tenth step and `log_history_limit=1000`. A row has the wall time of 1,000 steps in the first and in the last tenth
of the run, saves included; the resident memory of rank 0 after the first, fifth and last tenth; the bytes of the first
and of the last checkpoint, which grow until the record has its 1,000 logs, at step 10,000.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import print_json, print_table, versions
from torch import nn

from trainwright import Trainer, TrainerCallback, TrainerState, TrainingArguments

LIMIT = 1000
SAMPLES = 10
TENTHS = 10
FEATURES = 32
CLASSES = 4
LOGGING_STEPS = 10


def run_saves(make: Callable[[], Any], *, logs: int, saves: int, limit: int | None, samples: int) -> dict[str, float]:
    """Writes `samples` of the saves; returns the figures of the last, and the sums over all saves."""
    state = make()
    sizes: list[int] = []
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trainer_state.json")
        for save in range(1, samples + 1):
            for step in range(logs * (save - 1) // samples + 1, logs * save // samples + 1):
                state.log_history.append(
                    {"loss": 1 / step, "grad_norm": 1.5 + 1 / step, "learning_rate": 1e-3, "epoch": 0.01, "step": step}
                )
                if limit is not None:
                    del state.log_history[:-limit]
            state.global_step = logs * save // samples
            start = time.process_time()
            state.save_to_json(str(path))
            seconds.append(time.process_time() - start)
            sizes.append(path.stat().st_size)
    scale = saves / samples
    return {
        "last_mb": round(sizes[-1] / 1e6, 3),
        "all_gb": round(sum(sizes) * scale / 1e9, 3),
        "last_cpu_ms": round(seconds[-1] * 1e3, 1),
        "all_cpu_s": round(sum(seconds) * scale, 1),
    }


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


class Tenths(TrainerCallback):
    """Time and memory of this process at the bounds of the tenths of a run, and the bytes of its checkpoints."""

    def __init__(self, steps: int) -> None:
        self._steps = steps // TENTHS
        self._last_save: Path | None = None
        self.times: list[float] = []
        self.resident_mb: list[float] = []
        self.save_bytes: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._steps == 0:
            self._mark()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weigh_last_save()
        self._last_save = Path(args.output_dir, f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark()

    def weigh_last_save(self) -> None:
        """Records the bytes of the last checkpoint; only once the next one begins is it sure to be complete."""
        if self._last_save is not None:
            self.save_bytes.append(sum(path.stat().st_size for path in self._last_save.rglob("*") if path.is_file()))

    def _mark(self) -> None:
        self.times.append(time.perf_counter())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident_mb.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)


def train_in_process(folder: str, *, steps: int, save_steps: int) -> None:
    """Trains as one of the processes of torchrun; the first prints its figures as a JSON line."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    items = [{"x": torch.randn(FEATURES), "labels": i % CLASSES} for i in range(4096)]
    args = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=steps,
        save_steps=save_steps,
        save_total_limit=2,
        logging_steps=LOGGING_STEPS,
        log_history_limit=LIMIT,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    tenths = Tenths(steps)
    Trainer(model=Mlp(), args=args, train_dataset=items, callbacks=[tenths]).train()
    tenths.weigh_last_save()
    if args.process_index == 0:
        seconds = [end - start for start, end in itertools.pairwise(tenths.times)]
        scale = 1000 * TENTHS / steps
        print_json(
            {
                "benchmark": "long_runs",
                "processes": args.world_size,
                "steps": steps,
                "save_steps": save_steps,
                "seconds_per_1000_steps": [round(one * scale, 3) for one in seconds],
                "resident_mb": [round(one, 1) for one in tenths.resident_mb],
                "save_bytes": [tenths.save_bytes[0], tenths.save_bytes[-1]],
                **versions("torch"),
            }
        )
    if dist.is_initialized():
        dist.destroy_process_group()


def run_processes(counts: list[int], *, steps: int, save_steps: int) -> None:
    """Trains with each number of processes, one after another; prints their JSON lines, and the table."""
    rows = [["processes", "s per 1,000 steps: first", "last tenth", "MB: 1st", "5th", "last tenth", "save, B", "last"]]
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
            done = subprocess.run(
                [sys.executable, "-W", "ignore", *words, __file__, *sys.argv[1:]],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "LONG_RUN_IN": folder},
            )
        line = next(line for line in done.stdout.splitlines() if line.startswith('{"benchmark"'))
        print(line, flush=True)
        found = json.loads(line)
        seconds = found["seconds_per_1000_steps"]
        resident = found["resident_mb"]
        cells = [count, seconds[0], seconds[-1], resident[1], resident[TENTHS // 2], resident[-1], *found["save_bytes"]]
        rows.append([str(cell) for cell in cells])
    print_table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the logs and saves")
    parser.add_argument("--processes", metavar="N,N", help="train with these numbers of processes")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--save-steps", type=int, default=1_000)
    chosen = parser.parse_args()
    if "LONG_RUN_IN" in os.environ:
        train_in_process(os.environ["LONG_RUN_IN"], steps=chosen.steps, save_steps=chosen.save_steps)
        return 0
    if chosen.processes:
        counts = [int(one) for one in chosen.processes.split(",")]
        run_processes(counts, steps=chosen.steps, save_steps=chosen.save_steps)
        return 0
    measure_records(is_quick=chosen.quick)
    return 0


def measure_records(*, is_quick: bool) -> None:
    import transformers

    logs = 10_000 if is_quick else 100_000
    saves = 200 if is_quick else 2_000
    run = functools.partial(run_saves, logs=logs, saves=saves)
    found = {
        "transformers": run(transformers.TrainerState, limit=None, samples=SAMPLES),
        "trainwright, all": run(TrainerState, limit=None, samples=saves),
        "trainwright, limited": run(TrainerState, limit=LIMIT, samples=saves),
    }
    print_json({"benchmark": "long_runs", "logs": logs, "saves": saves, "found": found, **versions("transformers")})
    rows = [["record", "last file, MB", "all saves, GB", "last save, CPU ms", "all saves, CPU s"]]
    rows += [[name, *(str(value) for value in figures.values())] for name, figures in found.items()]
    print_table(rows)


if __name__ == "__main__":
    sys.exit(main())
