"""Checkpoints at a URL: what copies cost training, how fast an empty machine resumes, and the memory of both.

    python benchmarks/remote.py
    python benchmarks/remote.py --small    checkpoints of 2 MB

The store is an S3 server (moto) in a process of its own on this machine. It keeps the content of objects in memory:
moto itself reads a whole object from the disk for each request of a part of it, which would be all that a download
takes.
Each figure is the smallest of three turns.

- `save` is one of 48 MB every 50 steps, for a run that saves in its directory alone, and for one that copies to the URL
  too. `saving_s` is the time in which the training thread waits for a save. `lost_steps` is the time that the run takes
  longer for each save, in steps, and (on Linux) its parts: `work`, what the training thread itself does more;
  `locks`, the time in which it waits for the interpreter's lock, which the client holds, and for the disk; `cores`,
  the time in which it waits for a core. A server on another machine takes no cores of this one:
  `server_s` is what it takes for each save, and `client_s` what the threads of the client take.
- `resume` is the time from an empty directory to the end of the first step, less that of a resume from a local
  checkpoint, for a model with 500 MB of weights, trained by SGD; `bare` is the download of the same files by s3fs. Both
  write them to the disk, and both begin without a client, and when the disk has written what came before.
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
from trainwright.capabilities.mirror.remote import RemoteStore  # noqa: E402
from trainwright.checkpoint.manifest import Manifest, describe_files  # noqa: E402

NUM_SAVES = 3
SAVE_STEPS = 50
TURNS = 3


SERVER = """
import sys
from moto.s3.models import FakeKey
from moto.server import main

read = FakeKey.value.fget
write = FakeKey.value.fset

def value(key):
    if "content" not in vars(key):
        key.content = read(key)
    return key.content

def set_value(key, content):
    vars(key).pop("content", None)
    write(key, content)

FakeKey.value = property(value, set_value)
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


class Wide(nn.Module):
    """Most of its bytes are in one matrix, so a step is short beside a save."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.body(x).mean(-1), labels)}


@contextmanager
def s3_server() -> Iterator[psutil.Process]:
    """An S3 server with an empty bucket, which clients of this process find; yields its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(port)]
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
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def used_s(server: psutil.Process | None) -> dict[str, float]:
    """Seconds until now: of the clock, of this thread (work, and waits for a core), of this process, of the server."""
    found = {
        "steps": time.perf_counter(),
        "work": time.thread_time(),
        "cores": 0.0,
        "process": time.process_time(),
        "server": 0.0 if server is None else sum(server.cpu_times()[:2]),
    }
    schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if schedule.exists():
        found["cores"] = int(schedule.read_text().split()[1]) / 1e9
    return found


class Stopwatch(TrainerCallback):
    """Times of a run: when its first and its last step ended, and what lay between two steps."""

    first = 0.0
    last = 0.0

    def __init__(self, server: psutil.Process | None = None) -> None:
        self.server = server
        self.gaps: dict[int, float] = {}  # seconds after each step until the next one begins
        self.used: list[dict[str, float]] = []  # after the first step, and at the end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        if state.global_step in (1, state.max_steps):
            self.used.append(used_s(self.server))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.last:
            self.gaps[state.global_step] = time.perf_counter() - self.last

    def saving_s(self, save_steps: int) -> float:
        """Seconds between steps where a save lay between them, less those of other steps."""
        saves = [gap for step, gap in self.gaps.items() if step % save_steps == 0]
        others = [gap for step, gap in self.gaps.items() if step % save_steps != 0]
        return sum(saves) - len(saves) * (statistics.median(others) if others else 0.0)


def trained(
    width: int,
    folder: Path,
    url: str | None,
    *,
    max_steps: int,
    save_steps: int,
    resume: bool = False,
    server: psutil.Process | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Trains; seconds from the call of `train()` to the end of its first step, in its saves, and in all later steps."""
    args = TrainingArguments(
        output_dir=str(folder),
        checkpoint_mirror=url,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        save_steps=save_steps,
        save_total_limit=1,
        save_async=True,
        mirror_total_limit=None if url is None else 2,
        max_steps=max_steps,
        logging_strategy="no",
        **settings,
    )
    data = [{"x": torch.full((width,), float(i % 7)), "labels": float(i % 3)} for i in range(64)]
    watch = Stopwatch(server)
    torch.manual_seed(0)
    trainer = Trainer(model=Wide(width), args=args, train_dataset=data, callbacks=[watch])
    begun = time.perf_counter()
    with silence():
        trainer.train(resume_from_checkpoint="auto" if resume else None)
    return {
        "first_s": watch.first - begun,
        "saving_s": watch.saving_s(save_steps),
        **{f"{name}_s": watch.used[-1][name] - value for name, value in watch.used[0].items()},
    }


def saves(width: int, top: Path, server: psutil.Process) -> dict[str, float]:
    """What one save takes, without and with copies, in turns."""
    found: dict[str, list[dict[str, float]]] = {"none": [], "local": [], "copied": []}
    num_steps = NUM_SAVES * SAVE_STEPS + 1  # the last save is not at the last step
    for turn in range(TURNS):
        for name, url in (("none", None), ("local", None), ("copied", f"s3://bucket/saves-{turn}")):
            how = {"save_strategy": "no"} if name == "none" else {}
            os.sync()
            times = trained(
                width,
                top / f"{name}-{turn}",
                url,
                max_steps=num_steps,
                save_steps=SAVE_STEPS,
                server=server,
                per_device_train_batch_size=64,
                **how,
            )
            times["locks_s"] = times["steps_s"] - times["work_s"] - times["cores_s"]
            times["client_s"] = times["process_s"] - times["work_s"]
            found[name].append(times)
            shutil.rmtree(top / f"{name}-{turn}", ignore_errors=True)

    def least(name: str, what: str) -> float:
        return min(one[f"{what}_s"] for one in found[name])

    def lost_steps(name: str, what: str) -> float:
        return (least(name, what) - least("none", what)) / NUM_SAVES / step_s

    step_s = least("none", "steps") / (num_steps - 1)
    figures = {"step_s": step_s}
    for name in ("local", "copied"):
        figures[f"{name}_saving_s"] = least(name, "saving") / NUM_SAVES
        figures[f"{name}_lost_steps"] = lost_steps(name, "steps")
        for what in ("work", "locks", "cores"):
            figures[f"{name}_{what}"] = lost_steps(name, what)
    figures["client_s"] = (least("copied", "client") - least("local", "client")) / NUM_SAVES
    figures["server_s"] = least("copied", "server") / NUM_SAVES
    figures["ratio"] = figures["copied_saving_s"] / figures["local_saving_s"]
    return figures


def resumes(width: int, top: Path) -> dict[str, float]:
    """Seconds of a resume in an empty directory beyond one in a full directory, and of the bare download."""
    import fsspec

    url = "s3://bucket/resumed"
    common: dict[str, Any] = {"save_steps": 2, "optim": "sgd"}
    trained(width, top / "first", url, max_steps=2, **common)
    found: dict[str, list[float]] = {"resume": [], "bare": []}
    for turn in range(TURNS):
        shutil.copytree(top / "first", top / f"full-{turn}")
        os.sync()
        local = trained(width, top / f"full-{turn}", None, max_steps=3, resume=True, **common)
        shutil.rmtree(top / f"full-{turn}")
        os.sync()
        begun = time.perf_counter()
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        # A copy's name ends with the number of the lease under which it was written.
        (copy,) = store.glob("bucket/resumed/checkpoint-2-*")
        store.get(copy, str(top / f"bare-{turn}"), recursive=True)
        found["bare"].append(time.perf_counter() - begun)
        shutil.rmtree(top / f"bare-{turn}")
        os.sync()
        empty = trained(width, top / f"empty-{turn}", url, max_steps=3, resume=True, **common)
        found["resume"].append(empty["first_s"] - local["first_s"])
        # The next turn finds what this one found.
        remote = RemoteStore(url)
        for later in [one for one in remote.copies() if one.step == 3]:
            remote.remove(later)
        shutil.rmtree(top / f"empty-{turn}")
    figures = {f"{name}_s": min(values) for name, values in found.items()}
    return {**figures, "ratio": figures["resume_s"] / figures["bare_s"]}


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
    parser.add_argument("--small", action="store_true", help="checkpoints of 2 MB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    width, wide = (400, 700) if args.small else (2_000, 11_200)
    num_bytes = (2 if args.small else 200) << 20
    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        figures = {"save": saves(width, top, server), "resume": resumes(wide, top), "memory": memory(num_bytes, top)}
    print_json({"trainwright": figures, "versions": versions("torch", "s3fs", "moto")})
    print_table([("measured", "figures"), *((name, line(values)) for name, values in figures.items())])


def line(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


if __name__ == "__main__":
    main()
