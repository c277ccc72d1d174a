"""Peak memory of training GPT-2 of 124M parameters with AdamW, beside the same loop by hand.

    python benchmarks/memory.py            about three minutes
    python benchmarks/memory.py --small    a tiny model, to try the script

Each subject trains in a process of its own, in turns; its peak is that of the whole process, and beside it what the
process held when its imports were done, which is a trainer's own share of it. One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from harness import peak_bytes, print_json, print_table, run_apart, silence, versions  # noqa: E402

NAMES = ("hand", "trainwright", "transformers")
NUM_STEPS = 6
LENGTH = 64
LIMIT = 1.0


def run_alone(name: str, *, is_small: bool) -> dict[str, int]:
    """Trains in this process; its memory after the imports, and its peak."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

    library: Any = None if name == "hand" else importlib.import_module(name)
    if library is not None:
        _ = library.Trainer, library.TrainingArguments
    after_imports = peak_bytes()
    torch.manual_seed(0)
    size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000} if is_small else {}
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size))
    rows = torch.randint(0, 1000, (2 * NUM_STEPS, LENGTH)).tolist()
    items = [{"input_ids": row, "labels": row} for row in rows]
    if library is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model.train()
        for start in range(0, len(items), 2):
            batch = default_data_collator(items[start : start + 2])
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    else:
        with tempfile.TemporaryDirectory() as folder, silence():
            args = library.TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                per_device_train_batch_size=2,
                max_steps=NUM_STEPS,
                learning_rate=1e-4,
                logging_steps=2,
            )
            library.Trainer(model=model, args=args, train_dataset=items).train()
    return {"after_imports": after_imports, "peak": peak_bytes()}


def apart(name: str, *, is_small: bool) -> dict[str, int]:
    return run_apart(__file__, "--alone", name, *(["--small"] if is_small else []))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--alone", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(run_alone(args.alone, is_small=args.small)))
        return 0
    found: dict[str, list[dict[str, int]]] = {name: [] for name in NAMES}
    for _ in range(args.turns):
        for name in NAMES:
            found[name].append(apart(name, is_small=args.small))
    base = [one["peak"] for one in found["hand"]]
    subjects = {
        name: {
            "ratio": round(statistics.median(one["peak"] / b for one, b in zip(ones, base, strict=True)), 3),
            "peak_mb": round(statistics.median(one["peak"] for one in ones) / 1e6),
            "after_imports_mb": round(statistics.median(one["after_imports"] for one in ones) / 1e6),
        }
        for name, ones in found.items()
    }
    print_json(
        {
            "benchmark": "memory",
            "model": "tiny" if args.small else "gpt2-124m",
            "limit": LIMIT,
            "subjects": subjects,
            **versions("torch", "transformers", "trainwright"),
        }
    )
    print_table(
        [["subject", "ratio", "peak MB", "after imports MB", "limit"]]
        + [
            [name, *(str(value) for value in one.values()), f"{LIMIT:.2f}" if name == "trainwright" else ""]
            for name, one in subjects.items()
        ]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
