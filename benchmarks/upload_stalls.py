"""Steps during an upload: how long a training step waits while a checkpoint of 200 MB is sent to an S3 server.

    python benchmarks/upload_stalls.py
    python benchmarks/upload_stalls.py --small    a checkpoint of 2 MB

The store is the S3 server (moto) of `remote.py`, in a process on this machine. A step of about 20 ms is many small
operations, each of which gives the interpreter's lock away and takes it again. The steps of one run are compared with
each other: those before the first save, and those from the save until its copy is at the URL. `longest` is the longest
step and `mean` the mean, in medians of the steps before; `num_long` counts steps above two medians. `locks` is the
sum of their waits for the interpreter's lock and for the disk, `longest_lock` the longest of these, and
`cores` the mean wait of a step for a core, in medians too (Linux): server and client take the cores of this
machine, which a server elsewhere does not. A run without a mirror gives the same
figures for the same number of steps after its save (`local`). Each figure is the median of three runs.

One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import torch  # noqa: E402
from harness import print_json, print_table, silence, versions  # noqa: E402
from remote import s3_server, used_s  # noqa: E402
from torch import nn  # noqa: E402

from trainwright import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

NUM_LAYERS = 60
NUM_BEFORE = 60  # steps until the save
LEAST_AFTER = 30  # steps after it, if there is no upload
MOST_STEPS = 2000
TURNS = 3


class Deep(nn.Module):
    """Many small operations, and bytes that are saved and not trained."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(NUM_LAYERS))
        self.register_buffer("ballast", torch.zeros(num_bytes // 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": nn.functional.mse_loss(x.mean(-1), labels)}


class Steps(TrainerCallback):
    """Times of all steps; ends the run when the copy is at the URL, or after so many steps."""

    def __init__(self, num_after: int | None) -> None:
        self.num_after = num_after  # None: until the upload is done
        self.before: list[dict[str, float]] = []
        self.after: list[dict[str, float]] = []
        self._began: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = used_s(None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        took = {name: value - self._began[name] for name, value in used_s(None).items()}
        if state.global_step <= NUM_BEFORE:
            self.before.append(took)
            return
        self.after.append(took)
        if len(self.after) >= LEAST_AFTER and len(self.after) >= (self.num_after or 0) and self._is_sent(args):
            control.should_training_stop = True

    def _is_sent(self, args: Any) -> bool:
        return self.num_after is not None or '"kind": "mirror"' in (Path(args.output_dir) / "journal.jsonl").read_text()


def stalls(num_bytes: int, folder: Path, url: str | None, num_after: int | None) -> dict[str, float]:
    """Figures of one run."""
    steps = Steps(num_after)
    args = TrainingArguments(
        output_dir=str(folder),
        checkpoint_mirror=url,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        save_steps=NUM_BEFORE,
        save_only_model=True,
        save_async=True,
        max_steps=MOST_STEPS,
        logging_strategy="no",
        per_device_train_batch_size=128,
        optim="sgd",
        lr_scheduler_type="constant",
    )
    data = [{"x": torch.full((128,), float(i % 7)), "labels": float(i % 3)} for i in range(256)]
    torch.manual_seed(0)
    trainer = Trainer(model=Deep(num_bytes), args=args, train_dataset=data, callbacks=[steps])
    with silence():
        trainer.train()
    shutil.rmtree(folder)
    usual = statistics.median(one["steps"] for one in steps.before[10:])
    during = [one["steps"] for one in steps.after]
    waits = [one["steps"] - one["work"] - one["cores"] for one in steps.after]
    return {
        "step_ms": 1000 * usual,
        "num_steps": float(len(during)),
        "longest": max(during) / usual,
        "mean": statistics.fmean(during) / usual,
        "num_long": float(sum(one > 2 * usual for one in during)),
        "locks": sum(waits) / usual,
        "longest_lock": max(waits) / usual,
        "cores": statistics.fmean(one["cores"] for one in steps.after) / usual,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a checkpoint of 2 MB")
    num_bytes = (2 if parser.parse_args().small else 200) << 20
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {"uploading": [], "local": []}
    with s3_server(), tempfile.TemporaryDirectory() as folder:
        for turn in range(TURNS):
            one = stalls(num_bytes, Path(folder) / "run", f"s3://bucket/stalls-{turn}-{time.time_ns()}", None)
            found["uploading"].append(one)
            found["local"].append(stalls(num_bytes, Path(folder) / "run", None, int(one["num_steps"])))
    figures = {
        name: {key: statistics.median(one[key] for one in turns) for key in turns[0]} for name, turns in found.items()
    }
    print_json({"trainwright": figures, "threads": threading.active_count(), "versions": versions("torch", "s3fs")})
    columns = list(figures["local"])
    print_table(
        [("", *columns), *((name, *(f"{values[key]:.3g}" for key in columns)) for name, values in figures.items())]
    )


if __name__ == "__main__":
    main()
