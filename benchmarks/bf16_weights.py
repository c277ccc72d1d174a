"""The loss of a small Llama after training at a small rate, by the type of its weights and its optimizer.

    python -W ignore benchmarks/bf16_weights.py

The rows are drawn from a Markov chain over 64 tokens. Each line is a training of 1,500 steps in a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainwright.optim.adamw_bf16 import AdamWBF16

RATE = 5e-5
STEPS = 1500
BATCH = 8
VOCABULARY = 64
LENGTH = 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
Make = Callable[[Any], torch.optim.Optimizer]
# Name -> type of the weights, and what makes the optimizer.
SUBJECTS: dict[str, tuple[torch.dtype, Make]] = {
    "float32, bf16=True": (torch.float32, lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.0)),
    "bf16, adamw_torch": (torch.bfloat16, lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.0)),
    "bf16, adamw_bf16": (torch.bfloat16, lambda p: AdamWBF16(p, RATE, weight_decay=0.0)),
    "bf16, adamw_bf16, rounding=stochastic": (
        torch.bfloat16,
        lambda p: AdamWBF16(p, RATE, weight_decay=0.0, rounding="stochastic"),
    ),
}


def draw_rows(number: int, seed: int) -> torch.Tensor:
    """Returns token ids (number, LENGTH + 1)."""
    chain = torch.softmax(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2, -1)
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, VOCABULARY, (number, 1), generator=generator)]
    for _ in range(LENGTH):
        columns.append(torch.multinomial(chain[columns[-1][:, 0]], 1, generator=generator))
    return torch.cat(columns, 1)


def loss_after_training(dtype: torch.dtype, make: Make, rows: torch.Tensor, held_out: torch.Tensor) -> float:
    """Returns the loss of the held-out rows, computed in float32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        batch = rows[step * BATCH : (step + 1) * BATCH]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(model.float()(input_ids=held_out, labels=held_out).loss)


def main() -> None:
    """Prints a line for each subject."""
    rows = draw_rows(BATCH * STEPS, 3)
    held_out = draw_rows(256, 4)
    for name, (dtype, make) in SUBJECTS.items():
        print(f"{name:40} {loss_after_training(dtype, make, rows, held_out):.3f}", flush=True)


if __name__ == "__main__":
    main()
