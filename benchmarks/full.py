"""Runs every benchmark, one after the other, and writes RESULTS.md from what they print.

    python benchmarks/full.py                    all of them
    python benchmarks/full.py start memory       these, beside the others' last figures

The JSON lines of each script stay in `build/benchmarks/<name>.jsonl`, its table in `<name>.txt`. RESULTS.md begins with
`notes/gains.md`, what a user gains; then come the tables with `notes/<name>.md`, where a missed promise is explained,
and at its end `notes/promises.md`, which lists the promises for contributors, missed ones too.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from environment import NEEDS_MORE, make_environment  # noqa: E402
from harness import versions  # noqa: E402

HERE = Path(__file__).parent
# name: heading, options of the script, what the figures are and what was promised; first what users gain most by
BENCHMARKS: dict[str, tuple[str, str, str]] = {
    "gpu": (
        "On a GPU",
        "table",
        "Models of known sizes with random weights, beside a loop by hand and transformers, as `make gpu-bench` and "
        "`make gpu-more` measured them; the lines as they came are in `notes/gpu`. Promised: 1.01 of the loop by hand, "
        "and no wait for the device between two logs that the loop by hand does not have.",
    ),
    "tokens": (
        "Real tokens",
        "",
        "Docstrings of Python packages. Promised: token budget and packing at 3.5 times random batches and 1.7 times "
        "grouped ones (transformers'), with the same loss per token.",
    ),
    "packed_rows": (
        "Packed rows",
        "",
        "A narrow Llama of two layers, three rows of documents of 32 to 2,048 tokens on a CPU. The memory is the peak "
        "above the start, with the proof on the model.",
    ),
    "vocabulary": (
        "A large vocabulary",
        "",
        "A Llama of two layers with 150,000 words, four rows of 512 tokens a step: the peak of the whole process. "
        "Promised: the loss kernel takes at most 0.35 of the memory that the logits took, with the same loss.",
    ),
    "checkpoint": (
        "A checkpoint",
        "--saves 3 --steps 10",
        "GPT-2 of 124M parameters with AdamW. Promised: the loop is blocked for at most 1.5 quiet steps, and loses no "
        "more than a blocking save takes; the bytes of a blocking save; at most one snapshot more memory.",
    ),
    "resume": (
        "The first step after a resume",
        "",
        "Promised, beside loading: 0.3 s at 90 % of an epoch, no item read for a map dataset and one prefetch window "
        "for a stream.",
    ),
    "remote": (
        "Checkpoints at a URL",
        "",
        "An S3 server on the same machine; saves of 48 MB, and a resume of a model with 500 MB of weights. Promised: "
        "a save with copies takes training as long as one without; a resume in an empty directory takes at most 1.2 "
        "times the bare download more than one from a local checkpoint; memory grows by a few blocks, not by the size "
        "of a file.",
    ),
    "evaluation": (
        "Evaluation",
        "--transformers",
        "Batches of 62 MB logits. Promised: with metrics at most 1.1 times a loop that allocates once, in at most 1.2 "
        "times the logits' memory; streamed in one batch's; the loss alone at 1.05 times an inference loop.",
    ),
    "compiled": ("torch.compile with ragged batches", "", "Compilations, and the time of a step when they are done."),
    "memory": ("Peak memory", "", "GPT-2 of 124M parameters with AdamW. Promised: at most 1.00 of the loop by hand."),
    "long_context_memory": (
        "Memory of long sequences",
        "",
        "Predicted, in MB, for the fullest process: a Llama of 206M parameters, bf16, recomputed activations, one row "
        "in a micro-batch. Where processes share the row, FSDP shards the model over them too. The line of one process "
        "is that of `check(memory=True)`.",
    ),
    "ddp_step": (
        "Two processes",
        "",
        "A step under DDP and under FSDP2, each beside its loop by hand. Promised for DDP: 1.05.",
    ),
    "sharded_saves": (
        "Checkpoints in parts, one after the other",
        "",
        "Two processes with FSDP2. Promised: twenty in a row without a stall longer than the snapshot.",
    ),
    "watching": (
        "Watching a run",
        "",
        "Ratios to the same trainer without a journal and with a clock that stands still. Promised: 1 % for journal "
        "and clock, 2 % for a tracker that raises or hangs.",
    ),
    "start": (
        "Before the first step",
        "",
        "Promised: the import takes at most 1.08 times as long as `import torch` and 1.03 times its memory.",
    ),
    "step_overhead": (
        "A training step, as people run it",
        '--count --rows mlp "mlp x 8" own "own x 8" gpt2 llama padded arrow "loss of mlp" "loss of gpt2"',
        "Ratios of a step to an ordinary loop by hand: in machine instructions, counted by valgrind, which other work "
        "on the machine does not change, and in time (median, smallest and largest of the turns). Promised, in "
        "instructions: 1.15 for the MLP (1.10 with eight micro-batches), 1.00 for GPT-2, Llama and an evaluation of "
        "the loss alone; at most 450 Python calls for a step of the MLP. `limit` is what a slow test holds: the "
        "promise, or where that is missed what a step takes now.",
    ),
    "data_order": (
        "The order of samples",
        "",
        "Promised: a batch at most 1.05 times torch's DataLoader; the first batch after a resume in 0.3 s; 100 million "
        "rows shuffled in 50 MB.",
    ),
    "sizes": ("Cost against size", "", "Promised: nothing grows faster than what it is for."),
    "long_runs": (
        "Logs of a long run",
        "",
        "100,000 logs and 2,000 saves: `trainer_state.json` over all saves. Promised: with `log_history_limit`, bytes "
        "and time of a save do not grow with the run.",
    ),
}


def run(name: str, folder: Path) -> None:
    python = sys.executable if name in NEEDS_MORE else str(make_environment())
    command = [python, "-W", "ignore", str(HERE / f"{name}.py"), *shlex.split(BENCHMARKS[name][1])]
    # Bytecode is kept also where the environment forbids it: each import of ours would compile the package again.
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "PYTHONDONTWRITEBYTECODE": ""}
    if name != "checkpoint":
        environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    lines = done.stdout.splitlines()
    if not any(line.startswith("{") for line in lines):  # nothing could be measured here
        print(done.stdout)
        return
    (folder / f"{name}.jsonl").write_text("\n".join(line for line in lines if line.startswith("{")) + "\n")
    (folder / f"{name}.txt").write_text("\n".join(line for line in lines if not line.startswith("{")).strip() + "\n")


def machine() -> str:
    packages = versions("torch", "transformers", "accelerate", "datasets")
    python = packages.pop("python")
    kind = packages.pop("machine")
    return f"{os.cpu_count()} CPU cores ({kind}, {platform.system()}), Python {python}, " + ", ".join(
        f"{name} {version}" for name, version in packages.items()
    )


def render(folder: Path) -> str:
    """RESULTS.md, with a new section for each script that has run; the others keep their tables. Notes are as now."""
    parts = [
        "# Results",
        "Written by `python benchmarks/full.py` (`make bench-full`) from what the scripts print; `README.md` says how "
        "they measure. What counts are ratios within a run: seconds differ between machines, and between two minutes "
        "on a shared one.",
        f"{machine()}.",
        "## What a user gains",
        (HERE / "notes" / "gains.md").read_text().strip(),
    ]
    before = sections(HERE / "RESULTS.md")
    for name, (heading, options, text) in BENCHMARKS.items():
        table = folder / f"{name}.txt"
        note = HERE / "notes" / f"{name}.md"
        if table.is_file():
            day = datetime.date.fromtimestamp(table.stat().st_mtime)
            command = f"python benchmarks/{name}.py {options}".strip()
            parts += [f"## {heading}", text, f"`{command}`, {day}", f"```\n{table.read_text().rstrip()}\n```"]
        elif heading in before:
            parts.append(UP_TO_TABLE.match(before[heading]).group())  # type: ignore[union-attr]
        if note.is_file():
            parts.append(note.read_text().strip())
    parts += ["## Promises, for contributors", (HERE / "notes" / "promises.md").read_text().strip()]
    return "\n\n".join(parts) + "\n"


# A section up to the end of its table; where it has none, its heading.
UP_TO_TABLE = re.compile(r"## .*?\n```\n.*?\n```(?=\n|$)|## [^\n]*", re.S)


def sections(path: Path) -> dict[str, str]:
    """The sections of a page by their headings."""
    _, *found = path.read_text().split("\n## ") if path.is_file() else [""]
    return {one.partition("\n")[0]: "## " + one.strip() for one in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--render", action="store_true", help="run nothing, write RESULTS.md from the last figures")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; choose of {', '.join(BENCHMARKS)}")
    folder = HERE.parent / "build" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    for name in () if args.render else args.names or BENCHMARKS:
        print(f"{name} ...", flush=True)
        run(name, folder)
        if (table := folder / f"{name}.txt").is_file():
            print(table.read_text())
        (HERE / "RESULTS.md").write_text(render(folder))
    (HERE / "RESULTS.md").write_text(render(folder))


if __name__ == "__main__":
    main()
