"""torch.compile with ragged batches: how often it compiles, and steps per second when it has.

    python benchmarks/compiled.py
    python benchmarks/compiled.py --quick    the eager backend, which needs no compiler of C++

A small GPT-2 on sequences of 8 to 64 tokens, a batch padded to its longest. Each subject is a process of its own, since
what is compiled stays in a process. `padded to 64` rounds a batch's length up to a multiple of 64, as the argument
`pad_to_multiple_of` does for collators that pad, so that one shape is left. `regional` compiles the repeated blocks.
compile_s is the first step less a later one; for 12 layers, without inductor's caches, its ratio to that of the whole
model is what regional compilation saves. One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from harness import print_json, print_table, run_apart, silence, versions  # noqa: E402

SUBJECTS = (
    "hand, not compiled",
    "hand",
    "trainwright",
    "trainwright, regional",
    "trainwright, padded to 64",
    "transformers",
)
OF_12_LAYERS = ("trainwright, padded to 64, 12 layers", "trainwright, padded to 64, 12 layers, regional")
BATCH = 8
VOCAB = 512
WARM_UP = 30
NUM_STEPS = 150


def make_model(layers: int = 2) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 64, "n_layer": layers, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


def make_items() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 65, (BATCH * (WARM_UP + NUM_STEPS),), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, VOCAB, (n,), generator=generator).tolist()} for n in lengths]


def collate(rows: list[dict[str, Any]], multiple: int = 1) -> dict[str, Any]:
    import torch

    longest = -(-max(len(row["input_ids"]) for row in rows) // multiple) * multiple
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def run_alone(name: str, backend: str) -> dict[str, float]:
    """Trains in this process; steps per second after the warm-up, seconds of all, and graphs compiled."""
    import torch

    torch.set_num_threads(1)
    marks: list[float] = [time.perf_counter()]
    layers, warm_up, num_steps = (12, 1, 4) if "12 layers" in name else (2, WARM_UP, NUM_STEPS)
    if name.startswith("hand"):
        model = make_model()
        run: Any = torch.compile(model, backend=backend) if name == "hand" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model.train()
        items = make_items()
        for start in range(0, len(items), BATCH):
            run(**collate(items[start : start + BATCH])).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            marks.append(time.perf_counter())
    else:
        library = importlib.import_module(name.partition(",")[0])

        class Steps(library.TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                marks[0] = time.perf_counter() if "12 layers" in name else marks[0]

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                marks.append(time.perf_counter())

        pad = partial(collate, multiple=64 if "padded" in name else 1)
        with tempfile.TemporaryDirectory() as folder, silence():
            args = library.TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                per_device_train_batch_size=BATCH,
                max_steps=warm_up + num_steps,
                learning_rate=1e-4,
                logging_strategy="no",
                log_level="error",
                torch_compile_backend=backend,
                torch_compile="regional" if "regional" in name else True,
            )
            trainer = library.Trainer(
                model=make_model(layers), args=args, train_dataset=make_items(), data_collator=pad, callbacks=[Steps()]
            )
            trainer.train()
    timed = [after - before for before, after in zip(marks[warm_up:-1], marks[warm_up + 1 :], strict=True)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {
        "ms_per_step": round(statistics.median(timed) * 1e3, 2),
        "whole_s": round(marks[-1] - marks[0], 1),
        "compile_s": round(marks[1] - marks[0] - statistics.median(timed), 2),
        "compilations": graphs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the eager backend")
    parser.add_argument("--alone", choices=SUBJECTS + OF_12_LAYERS, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="inductor", help=argparse.SUPPRESS)
    args = parser.parse_args()
    backend = "aot_eager" if args.quick else args.backend
    if args.alone:
        print(json.dumps(run_alone(args.alone, backend)))
        return 0
    found: dict[str, dict[str, float]] = {}
    for name in SUBJECTS + OF_12_LAYERS:
        caches = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"} if name in OF_12_LAYERS else {}
        found[name] = run_apart(__file__, "--alone", name, "--backend", backend, environment=caches)
        found[name]["ratio"] = round(found[name]["ms_per_step"] / found["hand, not compiled"]["ms_per_step"], 2)
    whole, regional = (found[name]["compile_s"] for name in OF_12_LAYERS)
    print_json(
        {
            "benchmark": "compiled",
            "regional_to_whole_compile": round(regional / whole, 2),
            "backend": backend,
            "subjects": found,
            **versions("torch", "transformers", "trainwright"),
        }
    )
    columns = ["ms_per_step", "ratio", "compilations", "compile_s", "whole_s"]
    print_table([["subject", *columns]] + [[name, *(str(one[c]) for c in columns)] for name, one in found.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
