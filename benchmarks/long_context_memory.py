"""Memory of a step by the length of a sequence, and by how many processes share it, as `check(processes=...)` predicts.

    python benchmarks/long_context_memory.py
    python benchmarks/long_context_memory.py --small    two lines of a smaller model

A Llama of 206M parameters in bf16 with recomputed activations, one row for each micro-batch. Where processes share the
row (`cp_size`, `sp_size`), the model is sharded over them too (`fsdp=True`); the line of one process is what
`check(memory=True)` says. Nothing is computed and no memory taken but that of the weights: the numbers are those of
kernels that need no causal mask, as those of GPUs.

One JSON line, then a table in MB for the fullest process; `gathered` has the layers that are whole for their own pass
and the buffers of messages.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import torch  # noqa: E402
from harness import print_json, print_table, versions  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from trainwright import Trainer, TrainingArguments  # noqa: E402
from trainwright.preflight.memory.memory_plan import PeakMemory  # noqa: E402
from trainwright.preflight.memory.run_planner import plan_run  # noqa: E402

PARTS = {  # column -> kinds of the plan
    "weights": ("weights", "buffers"),
    "optimizer": ("optimizer",),
    "gradients": ("gradients",),
    "gathered": ("gathered", "communication"),
    "activations": ("activations",),
    "other": ("batch", "other"),
}


def model_of(layers: int, longest: int) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=longest,
        )
    )


def rows_of(length: int) -> list[dict[str, Any]]:
    ids = torch.ones(length, dtype=torch.long)
    return [{"input_ids": ids, "labels": ids}] * 16


def peaks(model: Any, tokens: int, shared: list[int], folder: str) -> Iterator[tuple[str, PeakMemory]]:
    """Yields how a row of so many tokens is shared, and the peak of the fullest process."""
    args = TrainingArguments(
        folder,
        use_cpu=True,
        bf16=True,
        activation_checkpointing=True,
        per_device_train_batch_size=1,
        max_steps=1,
        report_to="none",
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows_of(tokens))
    for size in shared:
        for way in ("cp", "sp") if size > 1 else ("",):
            engine = f"fsdp2+{way}{size}" if way else None
            plan = plan_run(trainer, size, per_node=size, engine=engine, budget=None, tries=False)
            yield (
                f"{way}_size={size}" if way else "one process",
                max((rank.peak for rank in plan.ranks), key=lambda peak: peak.total_bytes),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    is_small = parser.parse_args().small
    lengths = [1024] if is_small else [8192, 32_768, 131_072]
    shared = [1, 2] if is_small else [1, 2, 4, 8]
    model = model_of(layers=2 if is_small else 12, longest=lengths[-1])
    table = [["tokens", "shared by", "peak MB", *PARTS, "in"]]
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tokens in lengths:
            for way, peak in peaks(model, tokens, shared, folder):
                parts = {name: sum(peak.by_kind.get(kind, 0) for kind in kinds) for name, kinds in PARTS.items()}
                of_row = {name: size / 1e6 for name, size in {"peak": peak.total_bytes, **parts}.items()}
                figures[f"{tokens} tokens, {way}"] = of_row
                table.append([f"{tokens:,}", way, *(f"{size:,.0f}" for size in of_row.values()), peak.moment])
                print(f"{tokens} tokens, {way}", file=sys.stderr, flush=True)
    print_json({"case": "long_context_memory", **figures, **versions("torch", "trainwright", "transformers")})
    print_table(table)


if __name__ == "__main__":
    main()
