"""Checkpoints at a URL: what copies cost training, how fast an empty machine resumes, and the memory of both.

    python benchmarks/remote.py
    python benchmarks/remote.py --small    checkpoints of 2 MB instead of 48

The store is an S3 server (moto) in a process of its own on this machine, which shares its cores with training: seconds
count less than ratios.

- `save` is the time in which the training thread waits in `_save_checkpoint`, for a run that saves in its directory
  alone, and for one that copies to the URL too.
- `resume` is the time from an empty directory to the end of the first step, less that of a resume from a local
  checkpoint; `bare` is the download of the same files by s3fs. Both write them to the disk.
- `memory` is the growth of this process's resident memory during an upload and a download, without a model.

One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import psutil  # noqa: E402
import torch  # noqa: E402
from harness import print_json, print_table, silence, versions  # noqa: E402
from torch import nn  # noqa: E402

from trainwright import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from trainwright.checkpoint.manifest import Manifest, describe_files  # noqa: E402
from trainwright.checkpoint.remote import RemoteStore  # noqa: E402

NUM_STEPS = 24
SAVE_STEPS = 4
TURNS = 3


class Wide(nn.Module):
    """Most of its bytes are in one matrix, so a step is short beside a save."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.body(x).mean(-1), labels)}


@contextmanager
def s3_server() -> Iterator[None]:
    """An S3 server with an empty bucket, which clients of this process find."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        import fsspec

        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        yield
    finally:
        process.kill()
        process.wait()


class FirstStep(TrainerCallback):
    ended = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended = self.ended or time.perf_counter()


class Timed(Trainer):
    """Adds up the time in which its thread waits in a save."""

    saving_s = 0.0

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.saving_s += time.perf_counter() - begun


def trained(width: int, folder: Path, url: str | None, *, max_steps: int, resume: bool = False) -> tuple[float, float]:
    """Seconds from the call of `train()` to the end of its first step, and seconds in its saves."""
    args = TrainingArguments(
        output_dir=str(folder),
        checkpoint_mirror=url,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        save_steps=SAVE_STEPS,
        save_total_limit=1,
        save_async=True,
        mirror_total_limit=None if url is None else 2,
        max_steps=max_steps,
        logging_strategy="no",
    )
    data = [{"x": torch.full((width,), float(i % 7)), "labels": float(i % 3)} for i in range(64)]
    first = FirstStep()
    torch.manual_seed(0)
    trainer = Timed(model=Wide(width), args=args, train_dataset=data, callbacks=[first])
    begun = time.perf_counter()
    with silence():
        trainer.train(resume_from_checkpoint="auto" if resume else None)
    return first.ended - begun, trainer.saving_s


def saves(width: int, top: Path) -> dict[str, float]:
    """Seconds of one save, without and with copies, in turns."""
    seconds: dict[str, list[float]] = {"local": [], "copied": []}
    for turn in range(TURNS):
        for name, url in (("local", None), ("copied", f"s3://bucket/saves-{turn}")):
            _, saving_s = trained(width, top / f"{name}-{turn}", url, max_steps=NUM_STEPS)
            seconds[name].append(saving_s / (NUM_STEPS // SAVE_STEPS))
            shutil.rmtree(top / f"{name}-{turn}")
    return {f"{name}_s": statistics.median(values) for name, values in seconds.items()}


def resumes(width: int, top: Path) -> dict[str, float]:
    """Seconds of a resume in an empty directory beyond one in a full directory, and of the bare download."""
    import fsspec

    url = "s3://bucket/resumed"
    trained(width, top / "first", url, max_steps=SAVE_STEPS)
    found: dict[str, list[float]] = {"resume": [], "bare": []}
    store = fsspec.filesystem("s3", skip_instance_cache=True)
    for turn in range(TURNS):
        shutil.copytree(top / "first", top / f"full-{turn}")
        local_s, _ = trained(width, top / f"full-{turn}", None, max_steps=SAVE_STEPS + 1, resume=True)
        begun = time.perf_counter()
        store.get(f"bucket/resumed/checkpoint-{SAVE_STEPS}", str(top / f"bare-{turn}"), recursive=True)
        found["bare"].append(time.perf_counter() - begun)
        empty_s, _ = trained(width, top / f"empty-{turn}", url, max_steps=SAVE_STEPS + 1, resume=True)
        found["resume"].append(empty_s - local_s)
        RemoteStore(url).remove(SAVE_STEPS + 1)  # the next turn finds what this one found
        for name in ("full", "bare", "empty"):
            shutil.rmtree(top / f"{name}-{turn}")
    return {f"{name}_s": statistics.median(values) for name, values in found.items()}


def growth(work: Callable[[], object]) -> float:
    """Megabytes by which the resident memory of this process grows at most during a call."""
    process = psutil.Process()
    before = process.memory_info().rss
    most = [before]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            most.append(process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    work()
    is_over.set()
    watching.join()
    return (max(most) - before) / 1e6


def memory(num_bytes: int, top: Path) -> dict[str, float]:
    folder = top / "big"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        for _ in range(0, num_bytes, 1 << 20):
            file.write(os.urandom(1 << 20))
    manifest = Manifest(step=1, run_id="run", files=describe_files(folder))
    store = RemoteStore("s3://bucket/memory")
    upload_mb = growth(lambda: store.upload(folder, manifest))
    (top / "back").mkdir()
    download_mb = growth(lambda: store.download(manifest, top / "back"))
    return {"upload_mb": upload_mb, "download_mb": download_mb, "file_mb": num_bytes / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="checkpoints of 2 MB instead of 48")
    args = parser.parse_args()
    torch.set_num_threads(1)
    width = 400 if args.small else 2_000
    num_bytes = (2 if args.small else 200) << 20
    with s3_server(), tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        figures = {"save": saves(width, top), "resume": resumes(width, top), "memory": memory(num_bytes, top)}
    figures["save"]["ratio"] = figures["save"]["copied_s"] / figures["save"]["local_s"]
    figures["resume"]["ratio"] = figures["resume"]["resume_s"] / figures["resume"]["bare_s"]
    print_json({"trainwright": figures, "versions": versions("torch", "s3fs", "moto")})
    print_table([("measured", "figures"), *((name, line(values)) for name, values in figures.items())])


def line(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


if __name__ == "__main__":
    main()
