"""Machine instructions of a training step, which no other work on the machine changes, counted by valgrind's callgrind.

    python benchmarks/instructions.py            the MLP and GPT-2, accumulation 1 and 8; about half an hour
    python benchmarks/instructions.py --quick    the MLP without accumulation

Each subject trains twice in a process under valgrind, some steps and more steps; the difference is what a step takes.
Needs valgrind and a compiler of C++. One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

from harness import print_json, print_table, versions  # noqa: E402

SUBJECTS = ("hand", "trainwright", "transformers")
CASES = (("mlp", 1), ("mlp", 8), ("gpt2", 1))
STEPS = (11, 31)
SETUP = """
import sys
sys.path[:0] = [{here!r}, {source!r}]
import warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from instructions import train
train({subject!r}, {case!r}, {accumulation}, 3)
"""


def train(subject: str, case: str, accumulation: int, num_steps: int) -> None:
    """Trains as `step_overhead.py` does, logging nothing but at the end."""
    import importlib

    import step_overhead as steps
    from harness import silence

    class NoWatch:
        def step_done(self, step: int) -> None: ...

    chosen = next(one for one in steps.CASES if one.name == case)
    work = steps.Work(chosen, accumulation, logging_steps=10**6, num_steps=num_steps)
    watch: Any = NoWatch()
    with silence():
        if subject == "hand":
            steps.by_hand(work, watch)
        else:
            steps.by_trainer(importlib.import_module(subject), work, watch)


def per_step(subject: str, case: str, accumulation: int) -> float:
    """Instructions, in millions."""
    from torch.utils.benchmark import Timer

    place = {"here": str(HERE), "source": str(HERE.parent / "src")}
    setup = SETUP.format(subject=subject, case=case, accumulation=accumulation, **place)
    counted = []
    for num_steps in STEPS:
        timer = Timer(f"train({subject!r}, {case!r}, {accumulation}, {num_steps})", setup=setup)
        counted.append(timer.collect_callgrind(number=1, collect_baseline=False).counts())
    return (counted[1] - counted[0]) / (STEPS[1] - STEPS[0]) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the MLP without accumulation")
    is_quick = parser.parse_args().quick
    if shutil.which("valgrind") is None:
        print("valgrind is not installed, so nothing was counted.", file=sys.stderr)
        return 1
    found: dict[str, dict[str, float]] = {}
    for case, accumulation in CASES[: 1 if is_quick else None]:
        name = f"{case} x {accumulation}"
        found[name] = {subject: per_step(subject, case, accumulation) for subject in SUBJECTS}
    print_json({"benchmark": "instructions", "millions_per_step": found,
                **versions("torch", "transformers", "trainwright")})  # fmt: skip
    rows = [["model", "subject", "million instructions a step", "ratio"]]
    for name, counts in found.items():
        rows += [[name, subject, f"{count:.3f}", f"{count / counts['hand']:.3f}"] for subject, count in counts.items()]
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
