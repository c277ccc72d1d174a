"""Machine instructions of a training step, which no other work on the machine changes, counted by valgrind's callgrind.

    python benchmarks/instructions.py            MLP (accumulation 1 and 8, own data), GPT-2, Llama; half an hour
    python benchmarks/instructions.py --quick    the MLP without accumulation, and not the slow start of transformers
    python benchmarks/instructions.py --guards   the same, of guards: none, those of the defaults, and on_spike too

Each subject trains in a process under valgrind, which counts from the end of one step to the end of a later one. Needs
valgrind. One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from harness import print_json, print_table, silence, versions  # noqa: E402

SUBJECTS = ("hand", "trainwright", "transformers")
GUARDS = {  # subject -> settings of Trainwright
    "no guard": {"on_nonfinite": "ignore"},
    "on_nonfinite": {},
    "on_nonfinite, on_spike": {"on_spike": "skip"},
}
# A model, or "mlp/own" with a dataset class and a collator of the user's own; and the accumulation.
CASES = (("mlp", 1), ("mlp", 8), ("mlp/own", 1), ("gpt2", 1), ("llama", 1))
FIRST, LAST = 5, 25
WITH_GUARDS = 150, 350  # from a step at which the window of spikes is full


class Counts:
    """Has valgrind count from the end of one step to the end of another, and then what an order to it takes."""

    def __init__(self, first: int, last: int) -> None:
        self._orders = {first: ["--instr=on"], last: ["--dump", "--dump"]}

    def step_done(self, step: int) -> None:
        for order in self._orders.get(step, []):
            subprocess.run(["callgrind_control", order, str(os.getpid())], check=True, capture_output=True)


def run_alone(subject: str, case: str, accumulation: int) -> None:
    """Trains as `step_overhead.py` does, with one log at the very end."""
    import step_overhead as steps
    import torch

    torch.set_num_threads(1)
    model, _, data = case.partition("/")
    chosen = next(one for one in steps.CASES if one.name == model)
    first, last = steps_of(subject)
    work = steps.Work(chosen, accumulation, logging_steps=last + 1, num_steps=last + 1, data=data or "list")
    watch: Any = Counts(first, last)
    with silence():
        if subject == "hand":
            steps.by_hand(work, watch)
        else:
            library = "trainwright" if subject in GUARDS else subject
            steps.by_trainer(importlib.import_module(library), work, watch, **GUARDS.get(subject, {}))


def steps_of(subject: str) -> tuple[int, int]:
    """The steps between whose ends is counted."""
    return WITH_GUARDS if subject in GUARDS else (FIRST, LAST)


def per_step(subject: str, case: str, accumulation: int) -> float:
    """Instructions, in millions."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts",
                   sys.executable, "-W", "ignore", __file__, "--alone", subject, case, str(accumulation)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        texts = [Path(folder, f"counts.{number}").read_text() for number in (1, 2)]
        steps, order = (int(re.findall(r"^totals: (\d+)", text, re.M)[-1]) for text in texts)
    first, last = steps_of(subject)
    return (steps - order) / (last - first) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the MLP without accumulation, by hand and by Trainwright")
    parser.add_argument("--guards", action="store_true", help="the MLP without accumulation, by kind of guard")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        run_alone(asked.alone[0], asked.alone[1], int(asked.alone[2]))
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not installed, so nothing was counted.")
        return 0
    found: dict[str, dict[str, float]] = {}
    for case, accumulation in CASES[: 1 if asked.quick or asked.guards else None]:
        subjects = tuple(GUARDS) if asked.guards else SUBJECTS[: 2 if asked.quick else None]
        found[f"{case} x {accumulation}"] = {subject: per_step(subject, case, accumulation) for subject in subjects}
    print_json({"benchmark": "instructions", "millions_per_step": found,
                **versions("torch", "transformers", "trainwright")})  # fmt: skip
    rows = [["model", "subject", "million instructions a step", "ratio"]]
    for name, counts in found.items():
        first = next(iter(counts.values()))
        rows += [[name, subject, f"{count:.3f}", f"{count / first:.3f}"] for subject, count in counts.items()]
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
