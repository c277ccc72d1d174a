"""What comes before training: the import, the constructor, the first step.

    python benchmarks/start.py            about two minutes
    python benchmarks/start.py --quick
    python benchmarks/start.py --count    the first step in machine instructions too, by valgrind: ten minutes

    import      time and resident memory of `from <library> import Trainer, TrainingArguments` beside those of
                `import torch`, each in a fresh process, in turns
    first step  from the start of `train()` to the end of the first step, beside the same by hand: loader, optimizer,
                schedule, one step. All in one process that has trained before, in turns.
    constructor `Trainer(...)`, in milliseconds
    process     from the start of a process to the end of its first step, imports included, in CPU time, beside the
                loop by hand, which imports torch alone

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
from instructions import Counts, counted, run_jobs  # noqa: E402

LIBRARIES = ("trainwright", "transformers")
LIMITS = {"import_time": 1.08, "import_memory": 1.03}
LIMIT_OF_INSTRUCTIONS = 8.7  # of the first step, beside the loop by hand; held by tests/contract/test_instructions.py
LOOK = """
import json, time
start = time.perf_counter(), time.process_time()
{statement}
seconds = time.perf_counter() - start[0], time.process_time() - start[1]
status = open("/proc/self/status").read()
print(json.dumps([*seconds, int(status.split("VmRSS:")[1].split()[0]) * 1024]))
"""


def imported(statement: str) -> list[float]:
    """Seconds, seconds of the CPU, and resident bytes of an import in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", LOOK.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def imports(turns: int) -> dict[str, dict[str, float]]:
    statements = {"torch": "import torch"} | {
        name: f"from {name} import Trainer, TrainingArguments" for name in LIBRARIES
    }
    found: dict[str, list[list[float]]] = {name: [] for name in statements}
    for turn in range(turns + 1):
        for name, statement in statements.items():
            one = imported(statement)
            if turn:  # the first turn fills the caches of the disk
                found[name].append(one)
    base = found["torch"]
    return {
        name: {
            "ratio": round(statistics.median(a[0] / b[0] for a, b in zip(all_of_one, base, strict=True)), 2),
            "ratio_cpu": round(statistics.median(a[1] / b[1] for a, b in zip(all_of_one, base, strict=True)), 3),
            "ratio_least_cpu": round(min(one[1] for one in all_of_one) / min(one[1] for one in base), 3),
            "ms": round(statistics.median(one[0] for one in all_of_one) * 1e3),
            "memory_ratio": round(statistics.median(a[2] / b[2] for a, b in zip(all_of_one, base, strict=True)), 3),
            "mb": round(statistics.median(one[2] for one in all_of_one) / 1e6, 1),
        }
        for name, all_of_one in found.items()
    }


Mark = Callable[[str], object]  # called at the "constructor", at "train", and at the "end" of the first step


class Times:
    """Times of the moments of a first step."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def __call__(self, moment: str) -> None:
        self.at[moment] = time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        """Seconds of the constructor, and from `train()` to the end of the first step."""
        return self.at["train"] - self.at["constructor"], self.at["end"] - self.at["train"]


def by_hand(mark: Mark, *, is_alone: bool = False) -> None:
    import torch
    from step_overhead import BATCH, Mlp, make_optimizer, own_collator, vectors
    from torch import nn
    from torch.utils.data import DataLoader

    if is_alone:
        collate = own_collator
    else:
        from transformers import default_data_collator as collate

    model = Mlp()
    items = vectors(256)
    mark("constructor")
    mark("train")
    model.train()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 10)
    batch = next(iter(DataLoader(items, batch_size=BATCH, shuffle=True, collate_fn=collate)))
    loss = model(**batch)["loss"]
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    loss.item()
    mark("end")


def by_trainer(name: str, mark: Mark, *, is_alone: bool = False) -> None:
    from step_overhead import BATCH, LEARNING_RATE, WEIGHT_DECAY, Mlp, own_collator, vectors

    library = importlib.import_module(name)

    class TellsTheFirst(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            mark("end")

    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            max_steps=1,
            per_device_train_batch_size=BATCH,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            log_level="error",
        )
        model = Mlp()
        items = vectors(256)
        own = {"data_collator": own_collator} if is_alone else {}
        mark("constructor")
        trainer = library.Trainer(model=model, args=args, train_dataset=items, callbacks=[TellsTheFirst()], **own)
        mark("train")
        with silence():
            trainer.train()


def subjects() -> dict[str, Callable[..., None]]:  # of `by_hand`, and `by_trainer` of a library
    return {"hand": by_hand} | {name: partial(by_trainer, name) for name in LIBRARIES}


def first_steps(turns: int) -> dict[str, dict[str, float]]:
    import torch

    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects()}
    for turn in range(turns + 2):
        for name, subject in subjects().items():
            times = Times()
            subject(times)
            if turn > 1:
                found[name].append(times.seconds())
    base = [one[1] for one in found["hand"]]
    return {
        name: {
            "ratio": round(statistics.median(one[1] / b for one, b in zip(all_of_one, base, strict=True)), 2),
            "ratio_least": round(min(one[1] for one in all_of_one) / min(base), 2),
            "both_least": round(min(sum(one) for one in all_of_one) / min(base), 2),
            "ms": round(statistics.median(one[1] for one in all_of_one) * 1e3, 2),
            "constructor_ms": round(statistics.median(one[0] for one in all_of_one) * 1e3, 2),
        }
        for name, all_of_one in found.items()
    }


BOTH = "constructor and first step"
WARM_UP = 2  # first steps before the one that is counted


def count_first_steps(names: list[str]) -> None:
    """Under valgrind: each of these subjects in a fork, from `train()` and from the constructor on."""
    import torch

    torch.set_num_threads(1)

    def job(subject: Callable[[Mark], None], begins: str) -> None:
        for _ in range(WARM_UP):
            subject(Times())
        counts = Counts(0, 1)
        steps = {begins: 0, "end": 1}
        subject(lambda moment: counts.step_done(steps[moment]) if moment in steps else None)

    run_jobs(
        (row, name, partial(job, subject, begins), 1)
        for row, begins in (("first step", "train"), (BOTH, "constructor"))
        for name, subject in subjects().items()
        if name in names
    )


def processes(turns: int) -> dict[str, dict[str, float]]:
    """CPU time of processes that end with their first step."""
    found: dict[str, list[float]] = {name: [] for name in ("hand", *LIBRARIES)}
    for turn in range(turns + 1):
        for name, seconds in found.items():
            command = [sys.executable, "-W", "ignore", __file__, "--first-step-of", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if turn:
                seconds.append(float(done.stdout.splitlines()[-1]))
    base = found["hand"]
    return {
        name: {
            "ratio_cpu": round(statistics.median(a / b for a, b in zip(seconds, base, strict=True)), 3),
            "ratio_least_cpu": round(min(seconds) / min(base), 3),
            "cpu_ms": round(statistics.median(seconds) * 1e3),
        }
        for name, seconds in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three turns")
    parser.add_argument("--count", action="store_true", help="count the first step in machine instructions too")
    parser.add_argument("--counted", nargs="+", metavar="SUBJECT", help=argparse.SUPPRESS)
    parser.add_argument("--first-step-of", choices=("hand", *LIBRARIES), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.first_step_of:
        used: dict[str, float] = {}
        subjects()[asked.first_step_of](lambda moment: used.update({moment: time.process_time()}), is_alone=True)
        print(used["end"])
        return 0
    if asked.counted:
        count_first_steps(asked.counted)
        return 0
    of_counts = counted([__file__, "--counted", *subjects()]) if asked.count else {}
    turns = 3 if asked.quick else 9
    of_imports = imports(turns)
    of_steps = first_steps(3 * turns)
    of_processes = processes(turns)
    print_json(
        {
            "benchmark": "start",
            "turns": turns,
            "limits": LIMITS,
            "import": of_imports,
            "first_step": of_steps,
            "process": of_processes,
            "instructions": of_counts,
            **versions("torch", "transformers", "trainwright"),
        }
    )
    print_table(
        [["import", "ratio", "cpu", "least cpu", "ms", "memory", "MB", "limits"]]
        + [
            [name, *(str(value) for value in one.values()), "1.08, 1.03" if name == "trainwright" else ""]
            for name, one in of_imports.items()
        ]
    )
    print()
    print_table(
        [["first step", "ratio", "least", "with constructor", "ms", "constructor ms"]]
        + [[name, *(str(value) for value in one.values())] for name, one in of_steps.items()]
    )
    print()
    for row, millions in of_counts.items():
        print_table(
            [[row, "instructions", "millions"]]
            + [[name, f"{one / millions['hand']:.2f}", f"{one:.2f}"] for name, one in millions.items()]
        )
        print()
    print_table(
        [["process", "cpu", "least cpu", "cpu ms"]]
        + [[name, *(str(value) for value in one.values())] for name, one in of_processes.items()]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
