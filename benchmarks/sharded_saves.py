"""Twenty checkpoints in parts in a row, of two processes with FSDP2: how long each one holds training up.

    python benchmarks/sharded_saves.py            60 million parameters with AdamW: 0.7 GB a checkpoint
    python benchmarks/sharded_saves.py --small    a small model, to try the script

Two whole runs in the same two processes: ours, and a loop by hand with torch's own `async_save`. Before each save the
tensors of this process are copied into memory that is there already: the snapshot, which no such save can do without.
The stall is the time from the end of the step that saves to the begin of the next one; `ratio` is to that snapshot.
A save begins when the one before it is on the disk, as with more steps between them. One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from harness import print_json, print_table, versions  # noqa: E402

NUM_SAVES = 20
EVERY = 2
BATCH = 4


class Wide(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Clock:
    """Stalls and snapshots of one run, in seconds."""

    def __init__(self) -> None:
        self.stalls: list[float] = []
        self.snapshots: list[float] = []
        self._copies: list[torch.Tensor] = []
        self._saves_since: float | None = None

    def snapshot(self, tensors: list[torch.Tensor]) -> None:
        if not self._copies:
            self._copies = [torch.zeros_like(tensor) for tensor in tensors]
        started = time.perf_counter()
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor)
        self.snapshots.append(time.perf_counter() - started)

    def save_begins(self) -> None:
        self._saves_since = time.perf_counter()

    def step_begins(self) -> None:
        if self._saves_since is not None:
            self.stalls.append(time.perf_counter() - self._saves_since)
            self._saves_since = None


def local(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors that this process saves."""
    states = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    return [getattr(one, "to_local", lambda one=one: one)().detach() for one in [*model.parameters(), *states]]


def by_hand(model: nn.Module, clock: Clock, folder: Path) -> None:
    sharded: Any = fully_shard(model)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, fused=True)
    group = dist.new_group(backend="gloo")
    saving = None
    for step, x in enumerate(batches(model), start=1):
        clock.step_begins()
        sharded(x)["loss"].backward()
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            if saving is not None:
                saving.result()
                shutil.rmtree(folder / f"{step - 2 * EVERY}", ignore_errors=True)
            clock.snapshot(local(sharded, optimizer))
            clock.save_begins()
            weights, state = get_state_dict(sharded, optimizer)
            saving = dcp.async_save(
                {"model": weights, "optimizer": state}, checkpoint_id=folder / f"{step}", process_group=group
            )
    assert saving is not None
    saving.result()


def batches(model: nn.Module) -> Iterator[torch.Tensor]:
    width = next(model.parameters()).shape[-1]
    for number in range(NUM_SAVES * EVERY + 1):
        yield torch.randn(BATCH, width, generator=torch.Generator().manual_seed(number))


def by_trainer(model: nn.Module, clock: Clock, folder: Path) -> None:
    import trainwright

    class Times(trainwright.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step_begins()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % EVERY == 0:
                trainer._trainwright.services.writer.wait()
                clock.snapshot(local(trainer.model, trainer.optimizer))
                clock.save_begins()

    args = trainwright.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        max_steps=NUM_SAVES * EVERY + 1,
        learning_rate=1e-4,
        logging_strategy="no",
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        fsdp=True,
        fsdp_config={"auto_wrap_policy": "NO_WRAP", "state_dict_type": "SHARDED_STATE_DICT"},
    )
    data = [{"x": x} for batch in batches(model) for x in batch] * dist.get_world_size()
    trainer = trainwright.Trainer(model=model, args=args, train_dataset=data, callbacks=[Times()])
    trainer.train()


SUBJECTS: dict[str, Callable[[nn.Module, Clock, Path], None]] = {
    "async_save by hand": by_hand,
    "trainwright": by_trainer,
}


def in_a_process(folder: Path, *, is_small: bool) -> None:
    dist.init_process_group("gloo")
    width, depth = (64, 2) if is_small else (1500, 27)
    found = {}
    for name, subject in SUBJECTS.items():
        torch.manual_seed(0)
        clock = Clock()
        dist.barrier()
        subject(Wide(width, depth), clock, folder / name)
        ratios = [stall / snapshot for stall, snapshot in zip(clock.stalls[1:], clock.snapshots[1:], strict=True)]
        found[name] = {
            "snapshot_ms": round(1e3 * statistics.median(clock.snapshots[1:]), 1),
            "stall_ms": round(1e3 * statistics.median(clock.stalls[1:]), 1),
            "longest_ms": round(1e3 * max(clock.stalls[1:]), 1),
            "first_ms": round(1e3 * clock.stalls[0], 1),
            "ratio": round(statistics.median(ratios), 2),
            "largest_ratio": round(max(ratios), 2),
        }
    if dist.get_rank() == 0:
        print_json(
            {
                "benchmark": "sharded_saves",
                "saves": NUM_SAVES,
                "processes": dist.get_world_size(),
                "parameters": depth * width * (width + 1),
                **found,
                **versions(),
            }
        )
        columns = list(found["trainwright"])
        print_table([["subject", *columns], *([name, *map(str, one.values())] for name, one in found.items())])
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        in_a_process(Path(os.environ["SAVES_IN"]), is_small=chosen.small)
        return
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        *sys.argv[1:],
    ]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "SAVES_IN": folder})


if __name__ == "__main__":
    main()
