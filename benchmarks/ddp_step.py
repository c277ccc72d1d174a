"""A step of two processes, beside loops written by hand that do the same work: tiny GPT-2 with DDP, an MLP with FSDP2.

    python benchmarks/ddp_step.py               both, about four minutes
    python benchmarks/ddp_step.py --kind ddp    only this one
    python benchmarks/ddp_step.py --quick       fewer turns

The subjects take turns of ten steps in the same two processes (`harness.py`), each with a log at every tenth step. The
loop by hand has `gradient_as_bucket_view=True`; ours has its defaults, guards included, and is "told" where
`ddp_find_unused_parameters=False`. "Counting" divides by the labels of all processes, which takes an exchange before
each forward pass, as both trainers do by default. Accelerate shards nothing on a CPU, so under FSDP2 there is no
transformers. One JSON line for each kind: wall time in the main process and CPU time of both processes as ratios of
neighbouring turns, and what each subject asks of torch.distributed between two steps (DDP's own reducer works below
that, alike in all).
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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

from harness import Subject, Turns, Watch, print_json, print_table, silence, take_turns, versions  # noqa: E402
from step_overhead import (  # noqa: E402
    BATCH,
    LEARNING_RATE,
    WEIGHT_DECAY,
    OwnData,
    gpt2,
    make_optimizer,
    own_collator,
    sequences,
)

FEATURES = 64
WIDTH = 256
CLASSES = 8
LOGGING_STEPS = 10
LIMIT = 1.05
WARM_UP = 30
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


def vectors(num: int) -> list[dict[str, Any]]:
    drawn = [{"x": torch.randn(FEATURES), "labels": i % CLASSES} for i in range(256)]
    return [drawn[i % 256] for i in range(num)]


MODELS: dict[str, Callable[[], nn.Module]] = {"ddp": gpt2, "fsdp2": Mlp}
ITEMS: dict[str, Callable[[int], list[dict[str, Any]]]] = {"ddp": sequences, "fsdp2": vectors}


def model_and_data(kind: str, num_steps: int) -> tuple[nn.Module, OwnData]:
    torch.manual_seed(0)
    # One epoch is never left, so no subject has an end of one within a turn.
    return MODELS[kind](), OwnData(ITEMS[kind](2 * BATCH * (num_steps + 1)))


def by_hand(watch: Watch, *, kind: str, num_steps: int, counts: bool = False, **of_ddp: Any) -> None:
    """The ordinary loop of a careful person; with `counts`, each label of all processes weighs the same in a step."""
    model, data = model_and_data(kind, num_steps)
    model.train()
    wrapped: Any = (
        DistributedDataParallel(model, **{"gradient_as_bucket_view": True} | of_ddp)
        if kind == "ddp"
        else fully_shard(model)
    )
    optimizer = make_optimizer(wrapped)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / num_steps))
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data), collate_fn=own_collator)
    device = torch.device("cpu")
    running = torch.zeros(())
    batches = iter(loader)
    for step in range(1, num_steps + 1):
        batch = {name: value.to(device) for name, value in next(batches).items()}
        if counts:
            batch["num_items_in_batch"] = batch["labels"][..., 1:].ne(-100).sum()
            dist.all_reduce(batch["num_items_in_batch"])
        loss = wrapped(**batch)["loss"]
        if counts:
            loss = loss * dist.get_world_size()
        loss.backward()
        running += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        learning_rate = schedule.get_last_lr()[0]
        schedule.step()
        optimizer.zero_grad()
        if step % LOGGING_STEPS == 0:
            dist.all_reduce(running)
            mean = running.item() / LOGGING_STEPS / dist.get_world_size()
            print({"loss": mean, "grad_norm": float(grad_norm), "learning_rate": learning_rate, "step": step})
            running.zero_()
        watch.step_done(step)


def by_trainer(watch: Watch, *, library: str, kind: str, num_steps: int, **settings: Any) -> None:
    """A trainer of `library`, with its own defaults but for `settings`."""
    package = importlib.import_module(library)

    class TellsSteps(package.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.step_done(state.global_step)

    model, data = model_and_data(kind, num_steps)
    sharded = {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}} if kind == "fsdp2" else {}
    with tempfile.TemporaryDirectory() as output_dir:
        args = package.TrainingArguments(
            output_dir=output_dir,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            max_steps=num_steps,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            logging_steps=LOGGING_STEPS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="warning",
            **sharded,
            **settings,
        )
        trainer = package.Trainer(
            model=model, args=args, train_dataset=data, data_collator=own_collator, callbacks=[TellsSteps()]
        )
        trainer.train()


def subjects(kind: str, num_steps: int) -> dict[str, Subject]:
    """The loop by hand, ours, ours as people tune it, and the original where it can do the same."""
    by_library = partial(by_trainer, kind=kind, num_steps=num_steps)
    found: dict[str, Subject] = {
        "by hand": partial(by_hand, kind=kind, num_steps=num_steps),
        "trainwright": partial(by_library, library="trainwright"),
    }
    if kind == "ddp":
        hand = partial(by_hand, kind=kind, num_steps=num_steps)
        found["by hand, counting"] = partial(hand, counts=True)
        found["by hand, copies"] = partial(hand, gradient_as_bucket_view=False)
        found["by hand, as trainwright"] = partial(hand, counts=True, find_unused_parameters=True)
        told = {"ddp_find_unused_parameters": False}
        found["trainwright, told"] = partial(by_library, library="trainwright", **told)
        found["transformers"] = partial(by_library, library="transformers")
        found["transformers, told"] = partial(by_library, library="transformers", **told)
    return found


class Marks:
    """Times of the steps of one subject, of this process with all its threads."""

    def __init__(self, lap: Watch, turns: Turns) -> None:
        self._lap = lap
        self._turns = turns
        self._started = 0.0
        self.cpu_s: list[float] = []

    def step_done(self, step: int) -> None:
        if self._turns.starts(step):
            self._started = time.process_time()
        elif self._turns.ends(step) and step > self._turns.warm_up:
            self.cpu_s.append(time.process_time() - self._started)
        self._lap.step_done(step)


class Counts:
    """Collectives that python code asks for, by step."""

    def __init__(self) -> None:
        self.by_step: list[list[str]] = [[]]

    def step_done(self, step: int) -> None:
        self.by_step.append([])


def counted(subject: Subject, num_steps: int) -> list[str]:
    """Names of the collectives from the second step to the last but one."""
    counts = Counts()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts.by_step[-1].append(name)
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in COLLECTIVES:
            setattr(dist, name, wrap(name))
        with silence():
            subject(counts)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return [name for step in counts.by_step[1 : num_steps - 1] for name in step]


def summary(times: list[float], base: list[float]) -> dict[str, float]:
    """Ratio of neighbouring turns: the median, and the quarters around it."""
    found = [one / other for one, other in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(found, n=4)
    return {"median": round(middle, 3), "quarter": round(low, 3), "three_quarters": round(high, 3)}


def of_all_processes(times: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """CPU seconds of each turn, summed over the processes."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(times))
    return {name: [sum(turn) for turn in zip(*(one[name] for one in gathered), strict=True)] for name in times}


def in_a_process(kind: str, num_turns: int, only: list[str] | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    few = LOGGING_STEPS
    asked = {name: counted(subject, few) for name, subject in subjects(kind, few).items()}
    turns = Turns(warm_up=WARM_UP, num=num_turns, steps=LOGGING_STEPS)
    marks: dict[str, Marks] = {}

    def marked(name: str, subject: Subject) -> Subject:
        def run(lap: Watch) -> None:
            marks[name] = Marks(lap, turns)
            subject(marks[name])

        return run

    chosen = {name: one for name, one in subjects(kind, turns.total_steps).items() if not only or name in only}
    laps = take_turns({name: marked(name, subject) for name, subject in chosen.items()}, turns)
    cpu = of_all_processes({name: marks[name].cpu_s for name in chosen})
    if dist.get_rank() == 0:
        base = "by hand"
        wall_ratios = {name: summary(laps[name].wall_s, laps[base].wall_s) for name in chosen}
        cpu_ratios = {name: summary(cpu[name], cpu[base]) for name in chosen}
        found = {name: round(1e6 * statistics.median(laps[name].wall_s) / turns.steps, 1) for name in chosen}
        print_json(
            {
                "benchmark": "ddp_step",
                "kind": kind,
                "processes": dist.get_world_size(),
                "step_us": found,
                "ratios": wall_ratios,
                "cpu_ratios": cpu_ratios,
                "limit": LIMIT,
                "collectives_between_steps": asked,
                **versions("torch", "transformers"),
            }
        )
        print_table(
            [
                ["subject", "wall", "quarters", "cpu", "quarters", "us a step", "collectives from Python"],
                *(
                    [
                        f"{kind}, {name}",
                        str(wall_ratios[name]["median"]),
                        spread(wall_ratios[name]),
                        str(cpu_ratios[name]["median"]),
                        spread(cpu_ratios[name]),
                        str(us),
                        str(len(asked[name])),
                    ]
                    for name, us in found.items()
                ),
            ]
        )
    dist.destroy_process_group()


def spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['quarter']:.2f} to {ratio['three_quarters']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--turns", type=int, default=100, help="how often each subject has its turn; default 100")
    parser.add_argument("--kind", choices=list(MODELS), help="only this one")
    parser.add_argument("--subjects", nargs="+", help="time only these, and the loop by hand")
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        only = ["by hand", *chosen.subjects] if chosen.subjects else None
        in_a_process(chosen.kind, 20 if chosen.quick else chosen.turns, only)
        return
    for kind in [chosen.kind] if chosen.kind else list(MODELS):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            __file__,
            "--kind",
            kind,
            "--turns",
            str(chosen.turns),
            *(["--quick"] if chosen.quick else []),
            *(["--subjects", *chosen.subjects] if chosen.subjects else []),
        ]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    main()
