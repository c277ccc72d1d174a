"""A step of two processes with DDP and with FSDP2, beside loops written by hand that do the same work, in one run each.

python benchmarks/ddp_step.py            about four minutes
python benchmarks/ddp_step.py --quick    fewer turns

Whole runs of the subjects alternate in the same two processes; accelerate shards nothing on a CPU, so under FSDP2 there
is no transformers. One JSON line for each: the ratio of the times of a step in neighbouring runs, and what each asks of
torch.distributed between two steps (DDP's own reducer works below that, alike in all).
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from harness import print_json, print_table, versions  # noqa: E402

BATCH, FEATURES, WIDTH, CLASSES = 8, 64, 256, 8
LIMIT = 1.05
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"ddp_find_unused_parameters": False},
    "fsdp2": {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}},
}
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Mlp()


def items(num: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(FEATURES, generator=generator), "labels": torch.tensor(i % CLASSES)} for i in range(num)]


def by_hand(num_steps: int, after_step: Callable[[int], None], *, kind: str) -> None:
    data = items(num_steps * BATCH * 2)
    wrapped: Any = DistributedDataParallel(model()) if kind == "ddp" else fully_shard(model())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps))
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    for step, batch in enumerate(loader, start=1):
        loss = wrapped(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        after_step(step)


def by_trainer(num_steps: int, after_step: Callable[[int], None], *, library: str, kind: str) -> None:
    package = importlib.import_module(library)

    class Tells(package.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            after_step(state.global_step)

    args = package.TrainingArguments(
        output_dir=tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=1,
        learning_rate=1e-3, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        log_level="error", **SETTINGS[kind],
    )  # fmt: skip
    data = items(num_steps * BATCH * 2)
    package.Trainer(model=model(), args=args, train_dataset=data, callbacks=[Tells()]).train()


def counted(loop: Callable[..., None], num_steps: int) -> list[str]:
    """Collectives that python code asks for from the second step to the last but one."""
    calls: list[list[str]] = [[]]
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[-1].append(name)
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in COLLECTIVES:
            setattr(dist, name, wrap(name))
        loop(num_steps, lambda step: calls.append([]))
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return [name for step in calls[1 : num_steps - 1] for name in step]


def in_a_process(kind: str, turns: int, steps: int) -> None:
    """Rounds of whole runs: the loop by hand, the trainer, the loop by hand, ...; their first steps do not count."""
    import statistics
    import time

    dist.init_process_group("gloo")
    loops: dict[str, Callable[..., None]] = {"by hand": partial(by_hand, kind=kind)}
    for library in ("trainwright", "transformers") if kind == "ddp" else ("trainwright",):
        loops[library] = partial(by_trainer, library=library, kind=kind)
    asked = {name: counted(loop, 6) for name, loop in loops.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    warm_up = steps // 4
    for _ in range(turns):
        for name, loop in loops.items():
            marks: list[float] = []
            dist.barrier()
            loop(steps + warm_up, lambda step, marks=marks: marks.append(time.perf_counter()))
            times[name].append((marks[-1] - marks[warm_up]) / (len(marks) - 1 - warm_up))
    if dist.get_rank() == 0:
        ratios = {
            name: round(statistics.median(a / b for a, b in zip(values, times["by hand"], strict=True)), 3)
            for name, values in times.items()
        }
        found = {name: round(1e6 * statistics.median(values), 1) for name, values in times.items()}
        print_json({"benchmark": "ddp_step", "kind": kind, "processes": dist.get_world_size(), "step_us": found,
                    "ratios": ratios, "limit": LIMIT, "collectives_between_steps": asked,
                    **versions()})  # fmt: skip
        rows = [[f"{kind}, {name}", str(ratios[name]), str(us), str(len(asked[name]))] for name, us in found.items()]
        print_table([["subject", "ratio", "us a step", "collectives from Python"], *rows])
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kind", choices=SETTINGS, help="only this one")
    chosen = parser.parse_args()
    turns, steps = (5, 60) if chosen.quick else (15, 200)
    if "RANK" in os.environ:
        in_a_process(chosen.kind, turns, steps)
        return
    for kind in [chosen.kind] if chosen.kind else SETTINGS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__,
                   "--kind", kind, *(["--quick"] if chosen.quick else [])]  # fmt: skip
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    main()
