"""What counts on a GPU: tokens a second, memory, waits, lost time, beside a loop written by hand and transformers.

    python benchmarks/gpu.py bench --out DIR --minutes 8   most is measured in these minutes, the first cells first
    python benchmarks/gpu.py more --out DIR --minutes 8    the models that take longest
    python benchmarks/gpu.py bench --only NAME ...         the cells whose names begin so; --list names them
    python benchmarks/gpu.py bench --tiny                  tiny models, on the CPU where there is no accelerator
    python benchmarks/gpu.py plan --out DIR                the peak of memory that `check(memory=True)` plans, on a CPU
    python benchmarks/gpu.py table [FILE ...]              tables of such lines; of those in notes/gpu by default

Each cell is one training in a process of its own. Its line goes to DIR/gpu.jsonl and to the screen when it is done, so
that a command that is cut off has brought back the cells before; what libraries print is in DIR/gpu.log. A cell that
fails, or that takes longer than its limit, is a line too.

Weights are random, models are made on the device from their sizes, and nothing is downloaded. All subjects clip norms
at 1.0, use torch's fused AdamW and read the loss each ten steps. Full trainings have weights in bf16 without autocast;
with LoRA (rank 16 on all linear layers) and in the small models the computation is in autocast to bf16.

    tokens/s   between the ends of two steps, after a warm-up
    of hand    tokens a second beside those of the loop by hand
    MFU        model FLOPs utilization: 6 x parameters x tokens (4 x with LoRA) and those of causal attention, over the
               device's peak of the data sheet, dense 16-bit; what is computed again is not counted
    waits      how often the host waits for the device in a step between two logs, as
               torch.cuda.set_sync_debug_mode("warn") finds it
    stalls     on_gpu/stalls.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from on_gpu.cells import Cell, run_cells  # noqa: E402

OURS = "trainwright"
PACKED: dict[str, Any] = {"packing": "best_fit", "packing_length": 4096, "per_device_train_batch_size": 2}
LOSS: dict[str, Any] = {"loss_kernel": "auto"}
KEPT: dict[str, Any] = {**LOSS, "activation_checkpointing": False}
BF16: dict[str, Any] = {**KEPT, "optim": "adamw_bf16"}
BF16_BY_CHANCE: dict[str, Any] = {**BF16, "optim_args": "rounding=stochastic"}
COMPILED: dict[str, Any] = {"torch_compile": "regional"}
GRAPHS: dict[str, Any] = {**COMPILED, "torch_compile_mode": "reduce-overhead"}
ATTENTION_KEPT: dict[str, Any] = {**LOSS, "activation_checkpointing_kwargs": {"save": "attention"}}

# name of a job -> its fields, the limit of a cell in seconds (twice that for a compiled one), subject -> settings
PLAIN: dict[str, dict[str, Any]] = {"hand": {}, "transformers": {}, OURS: {}}
JOBS: dict[str, tuple[dict[str, Any], float, dict[str, dict[str, Any]]]] = {
    "Qwen3-0.6B, 8192 x 2": (
        {"shape": "Qwen3-0.6B", "batch": 2, "length": 8192, "recomputes": True, "warm_up": 3, "timed": 10},
        45,
        PLAIN
        | {f"{OURS}, activations kept": KEPT, f"{OURS}, kept and compiled": KEPT | COMPILED}
        | {f"{OURS}, kept, adamw_bf16": BF16, f"{OURS}, kept, adamw_bf16 by chance": BF16_BY_CHANCE},
    ),
    "Llama 20M, 128 x 8": (
        {"shape": "Llama 20M", "batch": 8, "length": 128, "autocasts": True, "warm_up": 20, "timed": 200},
        30,
        {"in turns": {}} | PLAIN | {f"{OURS}, CUDA graphs": GRAPHS},
    ),
    "Qwen3-0.6B, 512 x 1": (
        {"shape": "Qwen3-0.6B", "batch": 1, "length": 512, "warm_up": 10, "timed": 40},
        30,
        PLAIN,
    ),
    "stalls": ({}, 45, PLAIN),
    "chat, Qwen3-0.6B, to 2048": (
        {"shape": "Qwen3-0.6B", "batch": 8, "length": 2048, "is_ragged": True},
        45,
        {
            "transformers": {},
            OURS: {},
            f"{OURS}, packed": PACKED | LOSS,
            f"{OURS}, packed, flex attention": PACKED | LOSS | {"attention": "flex_attention"},
        },
    ),
    "Llama-3.1-8B LoRA, 4096 x 2 x 8": (
        {
            "shape": "Llama-3.1-8B",
            "batch": 2,
            "length": 4096,
            "accumulation": 8,
            "is_lora": True,
            "recomputes": True,
            "autocasts": True,
            "warm_up": 1,
            "timed": 1,
            "counted": 0,
        },
        75,
        PLAIN | {f"{OURS}, attention kept": ATTENTION_KEPT},
    ),
    "Qwen3-4B LoRA, 16384": (
        {
            "shape": "Qwen3-4B",
            "batch": 1,
            "length": 16384,
            "is_lora": True,
            "recomputes": True,
            "autocasts": True,
            "warm_up": 1,
            "timed": 4,
            "counted": 0,
        },
        60,
        PLAIN | {f"{OURS}, attention kept": ATTENTION_KEPT},
    ),
}
MORE = ("Llama-3.1-8B LoRA, 4096 x 2 x 8", "Qwen3-4B LoRA, 16384")
# Published by others, from other machines and settings; to read beside the table.
ANCHORS = {
    "Qwen3-0.6B, 8192 x 2": 26_005,  # accelerate's pull request for sequence parallelism: FlashAttention 3, compiled
    "Llama-3.1-8B LoRA, 4096 x 2 x 8": 12_473,  # NVIDIA AutoModel, without clipping
    "Qwen3-4B LoRA, 16384": 6_229,
}


def cells_of(command: str, only: list[str]) -> list[Cell]:
    """The cells of a command in the order of their worth, or those whose names begin so, in that order."""
    jobs = {job: (job in MORE) == (command == "more") for job in JOBS}
    found = {
        f"{job} | {subject}": limit_s * (2 if "torch_compile" in settings else 1)
        for job, (_, limit_s, subjects) in JOBS.items()
        if only or jobs[job]
        for subject, settings in subjects.items()
    }
    names = [name for begin in only for name in found if name.startswith(begin)] if only else [*found]
    return [Cell("machine", 60), *(Cell(name, found[name]) for name in dict.fromkeys(names))]


def machine() -> dict[str, Any]:
    import torch
    from harness import versions
    from on_gpu.models import DEVICE

    from trainwright.distributed.device import find_name

    return {
        "device": find_name(DEVICE) or DEVICE.type,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        **versions("torch", "transformers", "accelerate", "huggingface_hub", "peft"),
    }


def work_of(name: str, *, is_tiny: bool) -> tuple[Any, str, dict[str, Any]]:
    """The work of a cell, its subject, and the settings of the subject."""
    from on_gpu.loops import Job, Work

    job, _, subject = name.partition(" | ")
    fields, _, subjects = JOBS[job]
    settings = dict(subjects[subject])
    if is_tiny and "packing_length" in settings:
        settings["packing_length"] = 64
    if is_tiny and "torch_compile" in settings:  # tiny models only try the script; a compiler need not be there
        settings = {key: value for key, value in settings.items() if key != "torch_compile_mode"}
        settings["torch_compile_backend"] = "eager"
    if is_tiny:
        settings.pop("attention", None)  # torch trains flex attention on GPUs alone
    return Work(Job(job, **fields), is_tiny=is_tiny), subject, settings


def found_in(name: str, *, is_tiny: bool) -> dict[str, Any]:
    """Measures one cell in this process; one that fails returns the reason, under "failed"."""
    import torch
    from on_gpu import loops, stalls

    if name == "machine":
        return machine()
    job, _, subject = name.partition(" | ")
    try:
        if job == "stalls":
            return stalls.stall_of(subject, is_tiny=is_tiny)
        work, subject, settings = work_of(name, is_tiny=is_tiny)
        if subject == "in turns":
            return loops.measured_in_turns(loops.Job(job, **JOBS[job][0]), is_tiny=is_tiny)
        library = subject.partition(",")[0]
        run: Callable[..., None] = loops.by_hand
        if library != "hand":
            run = partial(loops.by_trainer, library=library, **settings)
        return (loops.measured_ragged if work.job.is_ragged else loops.measured)(work, run)
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def run_cell(name: str, result: Path, *, is_tiny: bool) -> None:
    """The process of one cell: imports, waits to be told to begin, writes what it found."""
    import warnings

    import torch
    import torch._dynamo
    import transformers
    from on_gpu import loops, stalls  # noqa: F401

    import trainwright

    # Both libraries load their parts when they are first asked for.
    for part in (
        trainwright.Trainer,
        transformers.Trainer,
        transformers.LlamaForCausalLM,
        transformers.Qwen3ForCausalLM,
    ):
        assert part is not None
    warnings.simplefilter("ignore")
    if sys.stdin.readline() != "begin\n":
        return
    torch.zeros(1, device=loops.DEVICE)  # so that statistics of its memory can be asked
    result.write_text(json.dumps(found_in(name, is_tiny=is_tiny)))


def plan(folder: Path, only: list[str], *, is_tiny: bool) -> None:
    """Writes the planned peak of each cell of ours, made on a CPU, to plan.jsonl."""
    import torch
    from on_gpu import loops

    import trainwright
    from trainwright.preflight.memory.planner import plan_memory  # `check` would also time a step, minutes on a CPU

    for cell in cells_of("bench", only or [*JOBS]):
        job, _, subject = cell.name.partition(" | ")
        if not subject.startswith(OURS) or job == "stalls" or "compile" in subject or "graphs" in subject:
            continue
        work, _, settings = work_of(cell.name, is_tiny=is_tiny)
        attention = settings.pop("attention", "sdpa")
        with tempfile.TemporaryDirectory() as output_dir:
            trainer = trainwright.Trainer(
                model=work.model(attention),
                args=loops.arguments_of(trainwright, work.job, output_dir, **settings),
                train_dataset=work.rows(),
                data_collator=loops.collate_padded if work.job.is_ragged else loops.default_data_collator,
            )
            peak = plan_memory(trainer, "80GB").peak
        line = {"cell": cell.name, "planned_gib": round(peak.total_bytes / 2**30, 2), "torch": torch.__version__}
        print(json.dumps(line), flush=True)
        with (folder / "plan.jsonl").open("a") as lines:
            print(json.dumps(line), file=lines)


def print_kept(paths: list[Path]) -> None:
    """Prints the lines that were kept as one JSON line, then tables, those of each machine apart."""
    from harness import print_json, print_table
    from on_gpu.tables import cells_of, print_tables

    plans = {name: line for path in paths if "plan" in path.name for name, line in cells_of(path).items()}
    machines = {path.stem: cells_of(path) for path in paths if "plan" not in path.name}
    print_json({"benchmark": "gpu", "trainwright": machines})
    for number, found in enumerate(machines.values()):
        if number:
            print()
        print_tables(found, plans)
    print()
    print_table(
        [["published by others, in other settings", "tokens/s"], *([job, str(one)] for job, one in ANCHORS.items())]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["bench", "more", "plan", "table", "cell"])
    parser.add_argument("names", nargs="*", help="files of lines, of table")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "gpu", help="a directory")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--only", nargs="*", default=[], help="begins of names, measured in this order")
    parser.add_argument("--list", action="store_true", help="name the cells and measure nothing")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script")
    chosen = parser.parse_args(arguments)
    if chosen.command == "cell":
        name, result = chosen.names
        run_cell(name, Path(result), is_tiny=chosen.tiny)
        return 0
    if chosen.command == "table":
        print_kept([Path(name) for name in chosen.names] or sorted((HERE / "notes" / "gpu").glob("*.jsonl")))
        return 0
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.command == "plan":
        plan(chosen.out, chosen.only, is_tiny=chosen.tiny)
        return 0
    cells = cells_of(chosen.command, chosen.only)
    if chosen.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    command = [sys.executable, str(HERE / "gpu.py"), *(["--tiny"] if chosen.tiny else []), "cell"]
    return 0 if run_cells(cells, command, chosen.out, chosen.minutes) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
