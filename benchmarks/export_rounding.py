"""How far rounding the weights of a random decoder moves its logits: the limit of `trainwright export --prove`.

    python benchmarks/export_rounding.py       a minute

Llamas of width 64 and 1 to 32 blocks, drawn with five seeds, are rounded to bf16 and fp16, and read the same tokens as
before. The largest difference of two logits, relative to the largest logit, is c x u x sqrt(n), with n blocks, u = 2^-8
in bf16 and 2^-11 in fp16. The table has the smallest and the largest c of the seeds, for weights of 0.02 (transformers
draws them so) and of 1/8 = 1/sqrt(64), at which a layer keeps the size of its input. The proof allows 8.
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent)]

from harness import print_json, print_table, versions  # noqa: E402

BLOCKS = (1, 2, 4, 8, 16, 32)
SEEDS = 5
SIZES = (0.02, 0.125)  # standard deviations of the weights
TYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def factor(blocks: int, seed: int, dtype: torch.dtype, size: float) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
    sizes["initializer_range"] = size
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=blocks, **sizes)).eval()
    ids = torch.randint(0, 512, (4, 64))
    with torch.no_grad():
        before = model(ids).logits
        after = copy.deepcopy(model).to(dtype)(ids).logits.float()
    away = float((before - after).abs().max() / before.abs().max())
    return away / (TYPES[dtype] * math.sqrt(blocks))


def main() -> None:
    found = {
        f"{str(dtype).removeprefix('torch.')}, weights of {size:g}": {
            n: [factor(n, seed, dtype, size) for seed in range(SEEDS)] for n in BLOCKS
        }
        for dtype in TYPES
        for size in SIZES
    }
    print_json({"benchmark": "export_rounding", "versions": versions("torch", "transformers"), "found": found})
    rows = [("blocks", *map(str, BLOCKS))]
    rows += [(name, *(f"{min(one):.1f} to {max(one):.1f}" for one in by.values())) for name, by in found.items()]
    print_table(rows)


if __name__ == "__main__":
    main()
