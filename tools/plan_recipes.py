"""Plans the memory of the recipes of `trainwright init chat --like NAME`, and writes the figures that they show.

    python tools/plan_recipes.py [NAME ...]

Models have the shapes of the named ones and no weights, so a laptop plans a model of 8B parameters. The figures are in
`src/trainwright/cli/recipe/templates/like.json`, and a test compares them with this script's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

ROOT = Path(__file__).parents[1]
FILE = ROOT / "src/trainwright/cli/recipe/templates/like.json"
SPEEDS = ROOT / "benchmarks/notes/gpu"
LENGTH = 2048
NUM_ROWS = (1, 4, 16)
# Bits per weight of NF4 with double quantization: 4, and its scales.
NF4_BITS = 4.127

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
    },
}
# Cells of benchmarks/gpu.py that trained an adapter of the same rank, and how.
MEASURED = {
    "qwen3-4b": ("Qwen3-4B LoRA, 16384 | trainwright", "rows of 16,384 tokens"),
    "llama-3.1-8b": ("Llama-3.1-8B LoRA, 4096 x 2 x 8 | trainwright", "2 rows of 4,096 tokens"),
}


def read_recipe(name: str) -> dict[str, Any]:
    from trainwright.cli.recipe.recipe_reader import template

    recipe: dict[str, Any] = yaml.safe_load(template("chat", like=name))
    return recipe


def make_model(name: str) -> nn.Module:
    """The model with its adapter; its weights have addresses, and no memory until somebody writes to them."""
    from peft import LoraConfig, get_peft_model

    shape = dict(SHAPES[name])
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), max_position_embeddings=LENGTH, **shape)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model = model.to_empty(device="cpu")
    model.tie_weights()
    model.config.use_cache = False
    model.enable_input_require_grads()
    lora = read_recipe(name)["lora"]
    adapter = LoraConfig(r=lora["r"], lora_alpha=lora["alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapter)


def plan_gb(name: str, model: nn.Module, num_rows: int) -> float:
    """The peak of a step with full rows and the settings of the recipe, in 10^9 bytes; with whole logits.

    The recipe's loss (`loss_kernel`) makes parts of them and leaves more room; it compares values when it begins, which
    a plan without values cannot follow.
    """
    from trainwright import Trainer, TrainingArguments
    from trainwright.preflight.memory.planner import predicted_peak

    given = read_recipe(name)["training"]
    # The other settings of the recipe do not change the memory of a step with full rows.
    settings = {key: given[key] for key in ("bf16", "activation_checkpointing")}
    row = {"input_ids": [1] * LENGTH, "labels": [1] * LENGTH}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            folder,
            max_steps=1,
            per_device_train_batch_size=num_rows,
            log_level="error",
            report_to="none",
            use_cpu=True,
            **settings,
        )
        trainer = Trainer(
            model, arguments, train_dataset=[row] * num_rows, data_collator=transformers.default_data_collator
        )
        return round(predicted_peak(trainer, {}).total_bytes / 1e9, 1)


def saved_by_4bit_gb(model: nn.Module) -> float:
    """By arithmetic: the linear layers below the adapter, from 16 bits a weight."""
    linear = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith("base_layer")
    )
    return round(linear * (16 - NF4_BITS) / 8 / 1e9, 1)


def read_speed(name: str) -> dict[str, Any] | None:
    """The newest measurement of the job that is nearest to the recipe; None where there is none."""
    if name not in MEASURED:
        return None
    cell, rows = MEASURED[name]
    lines = [json.loads(line) for path in sorted(SPEEDS.glob("*h100*.jsonl")) for line in path.read_text().splitlines()]
    found = [line for line in lines if line.get("cell") == cell and "tokens_per_second" in line]
    return {"tokens_per_second": round(found[-1]["tokens_per_second"]), "rows": rows, "device": "one H100 (80 GB)"}


def plan_recipe(name: str) -> dict[str, Any]:
    model = make_model(name)
    return {
        "memory_gb": {str(num): plan_gb(name, model, num) for num in NUM_ROWS},
        "saved_by_4bit_gb": saved_by_4bit_gb(model),
        "speed": read_speed(name),
    }


def main() -> None:
    figures = json.loads(FILE.read_text())
    for name in sys.argv[1:] or SHAPES:
        figures[name] |= plan_recipe(name)
        print(name, json.dumps(figures[name]), flush=True)
        FILE.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
