"""Whole trainings in seconds: transformers, ours with the same settings and with `speed="auto"`, and TRL for chats.

    python benchmarks/real_work.py                    both tasks, three seeds: an hour on two quiet cores
    python benchmarks/real_work.py --task chat --seeds 1 --share 0.5

    demo    examples/text_classification.py: MiniLM on 4,000 film reviews, four evaluations of 1,000
    chat    a small Llama, from scratch, learns to say in a sentence what a function does: 2,000 functions of Python's
            standard library, each with the beginning of its docstring as the answer; the loss is that of the answers.
            TRL's SFTTrainer trains on the same tokens too, and once more as axolotl's examples for chats have it:
            samples packed into rows of full length (`packing`), the rest equal

Each training is a process of its own, from its start to its end; the ways take turns, seed by seed. Ours measures anew
in each (`XDG_CACHE_HOME` is an empty folder). `cpu` is the CPU time of the process: where other work runs on the
machine, it is the one to believe. Accuracy is that of held-out reviews, loss that of a token of held-out answers.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import print_json, print_table, versions

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
WAYS = ("transformers", "trainwright", "trainwright, speed=auto")
OF_TRL = ("trl", "trl, packing=True")
WAYS_OF = {"demo": WAYS, "chat": (*WAYS, *OF_TRL)}
TASKS = {"demo": "accuracy", "chat": "loss"}
FAST = {"speed": "auto", "eval_sampling_strategy": "by_length"}  # the first evaluation comes before the choice
VOCABULARY = 8192
MAX_LENGTH = 384
NUM_CHATS = 2000
NUM_HELD_OUT = 200


# -- one training, in a process of its own --------------------------------------------------------------------------


def demo(library: Any, *, is_fast: bool, seed: int, share: float, folder: str) -> dict[str, float]:
    """The example of the README; the original lacks nothing that it needs but an argument for a fresh start."""
    sys.path.insert(0, str(EXAMPLES))
    example: Any = importlib.import_module("text_classification")

    example.DEMO_SETTINGS |= FAST if is_fast else {}
    example.Trainer = library.Trainer
    if library.__name__ == "transformers":
        library.TrainingArguments.overwrite_output_dir = None  # which it has no more, and the example asks for
        example.TrainingArguments = library.TrainingArguments
        example.HfArgumentParser = library.HfArgumentParser
    numbers = {"output_dir": folder, "seed": seed, "report_to": "none", "disable_tqdm": True}
    numbers |= {"max_train_samples": int(4000 * share), "max_eval_samples": int(1000 * share)}
    sys.argv = ["demo", *(text for name, value in numbers.items() for text in (f"--{name}", str(value)))]
    example.main()
    results = json.loads((Path(folder) / "eval_results.json").read_text())
    return {"accuracy": results["eval_accuracy"], "loss": results["eval_loss"]}


def chat(
    library: Any, *, is_fast: bool, seed: int, share: float, folder: str, is_packed: bool = False
) -> dict[str, float]:
    """Questions about code with short answers; only the tokens of the answers have labels."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    pairs = functions_with_summaries()
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(
        (text for pair in pairs for text in pair),
        VOCABULARY,
        special_tokens=["<pad>", "<user>", "<assistant>", "<end>"],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, pad_token="<pad>")
    items = []
    for code, summary in pairs:
        question = tokenizer(f"<user>{code}<assistant>")["input_ids"][-MAX_LENGTH:]
        answer = tokenizer(f"{summary}<end>")["input_ids"]
        ids = (question + answer)[-MAX_LENGTH:]
        answer = answer[-MAX_LENGTH:]
        items.append({"input_ids": ids, "labels": [-100] * (len(ids) - len(answer)) + answer})
    set_seed(seed)
    order = random.Random(0).sample(range(len(items)), int(NUM_CHATS * share) + NUM_HELD_OUT)
    held_out = [items[i] for i in order[:NUM_HELD_OUT]]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=0,
    )
    settings: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 1e-3,
        "logging_steps": 25,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
        **(FAST if is_fast else {}),
    }
    rows = [items[i] for i in order[NUM_HELD_OUT:]]
    parts: dict[str, Any] = {"model": LlamaForCausalLM(config), "processing_class": tokenizer}
    if library.__name__ == "trl":
        trainer = trainer_of_trl(library, parts, rows, settings, packs=is_packed)
    else:
        collate = DataCollatorForSeq2Seq(tokenizer)
        args = library.TrainingArguments(**settings)
        trainer = library.Trainer(**parts, args=args, train_dataset=rows, eval_dataset=held_out, data_collator=collate)
    trainer.train()
    # Over the labels of all answers: the mean of the batches' means differs from it.
    return {"loss": loss_per_token(trainer, held_out)}


def trainer_of_trl(
    library: Any, parts: dict[str, Any], rows: list[Any], settings: dict[str, Any], *, packs: bool
) -> Any:
    """SFTTrainer on the same tokens; what its settings change in TrainingArguments' is changed back."""
    from datasets import Dataset

    masked = [
        {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in rows
    ]
    args = library.SFTConfig(
        **settings,
        max_length=MAX_LENGTH,
        packing=packs,
        completion_only_loss=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
    )
    return library.SFTTrainer(**parts, args=args, train_dataset=Dataset.from_list(masked))


def loss_per_token(trainer: Any, items: list[dict[str, Any]]) -> float:
    import torch

    total = 0.0
    num_labels = 0
    trainer.model.eval()
    with torch.no_grad():
        for item in items:
            labels = torch.tensor([item["labels"]])
            count = int((labels[:, 1:] != -100).sum())
            total += count * float(trainer.model(input_ids=torch.tensor([item["input_ids"]]), labels=labels).loss)
            num_labels += count
    return total / num_labels


def functions_with_summaries() -> list[tuple[str, str]]:
    """Functions of the standard library without their docstrings, and the first paragraphs of these."""
    found = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            lines = source.splitlines()
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (text := ast.get_docstring(node)):
                docstring = node.body[0]
                code = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
                found.append(("\n".join(code), " ".join(text.partition("\n\n")[0].split())))
    return found


def run_one(task: str, way: str, seed: int, share: float) -> None:
    library = importlib.import_module(way.partition(",")[0])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        settings: dict[str, Any] = {"is_fast": way.endswith("auto"), "seed": seed, "share": share, "folder": folder}
        if way in OF_TRL:
            settings["is_packed"] = "packing" in way
        result = {"demo": demo, "chat": chat}[task](library, **settings)
    print("RESULT", json.dumps(result))


# -- all of them ----------------------------------------------------------------------------------------------------


def timed(task: str, way: str, seed: int, share: float) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    command = [sys.executable, __file__, "--one", task, way, str(seed), "--share", str(share)]
    done = subprocess.run(command, text=True, capture_output=True)
    wall_s = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{task}, {way}: {done.stderr[-3000:]}")
    lines = done.stdout.splitlines()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = [line for line in lines if line.startswith(("speed  ", "          suggested"))]
    result = json.loads(next(line for line in lines if line.startswith("RESULT")).partition(" ")[2])
    print(f"{task}, {way}, seed {seed}: {wall_s:.1f} s, cpu {cpu_s:.1f} s, {result}", *said, sep="\n", flush=True)
    return {"task": task, "way": way, "seed": seed, "wall_s": wall_s, "cpu_s": cpu_s, "said": said, **result}


def summary(runs: list[dict[str, Any]], task: str) -> list[list[str]]:
    """A row of the table for each way, with means over the seeds, and ratios seed by seed."""
    rows = [[task, "wall, s", "times as fast", "cpu, s", "times as fast", f"{TASKS[task]} (by seed)"]]
    of = {way: [run for run in runs if (run["task"], run["way"]) == (task, way)] for way in WAYS_OF[task]}
    for way, some in of.items():
        row = [way]
        for clock in ("wall_s", "cpu_s"):
            ratios = [first[clock] / run[clock] for first, run in zip(of["transformers"], some, strict=True)]
            row.append(f"{statistics.mean(run[clock] for run in some):.0f}")
            row.append(f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        values = [run[TASKS[task]] for run in some]
        rows.append([*row, f"{statistics.mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*TASKS], help="Only this one.")
    parser.add_argument("--seeds", type=int, default=3, help="Trainings of each way.")
    parser.add_argument("--share", type=float, default=1.0, help="Share of the data.")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        task, way, seed = args.one
        run_one(task, way, int(seed), args.share)
        return
    tasks = [args.task] if args.task else [*TASKS]
    runs = []
    for task in tasks:
        for seed in range(args.seeds):
            ways = WAYS_OF[task]
            for place in range(len(ways)):
                runs.append(timed(task, ways[(place + seed) % len(ways)], seed, args.share))
    runs.sort(key=lambda run: run["seed"])
    print_json(
        {"benchmark": "real_work", "share": args.share, "runs": runs, "versions": versions("torch", "transformers")}
    )
    for task in tasks:
        print_table(summary(runs, task))


if __name__ == "__main__":
    main()
