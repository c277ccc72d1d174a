"""Models whose step is large enough that its memory says something, and settings that change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

Item = dict[str, Any]


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    data: Callable[[], list[Item]]
    settings: dict[str, Any] = field(default_factory=dict)


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class LooksAtValues(Classifier):
    """What it computes depends on values, which a stand-in does not have."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if x.sum() > 1e9:
            raise ValueError("too large")
        return super().forward(x, labels)


def mlp(kind: type[Classifier] = Classifier) -> nn.Module:
    return kind(nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 128)), 128)


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 64)


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
    )


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=1000, n_embd=128, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=1000, d_model=128, d_kv=32, d_ff=256, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def vectors() -> list[Item]:
    return [{"x": torch.full((128,), i / 256), "labels": i % 3} for i in range(256)]


def images() -> list[Item]:
    return [{"x": torch.full((3, 32, 32), i / 16), "labels": i % 3} for i in range(16)]


def tokens() -> list[Item]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 1000, (48,), generator=generator).tolist() for _ in range(32)]
    return [{"input_ids": row, "attention_mask": [1] * 48, "labels": row} for row in rows]


def packed_tokens() -> list[Item]:
    """Two samples in each row, so that every process needs a mask."""
    rows = [{name: one[name] for name in ("input_ids", "labels")} for one in tokens()]
    return [{**one, "position_ids": [*range(20), *range(28)]} for one in rows]


def sentences() -> list[Item]:
    return [{**one, "labels": i % 3} for i, one in enumerate(tokens())]


CASES = {
    "mlp": Case(mlp, vectors, {"per_device_train_batch_size": 128}),
    "convolutions": Case(convolutions, images),
    "llama": Case(llama, tokens),
    "llama-accumulated": Case(llama, tokens, {"gradient_accumulation_steps": 2}),
    "llama-checkpointed": Case(llama, tokens, {"activation_checkpointing": True}),
    "llama-packed": Case(llama, packed_tokens),
    "llama-bf16": Case(llama, tokens, {"bf16": True}),
    "llama-adafactor": Case(llama, tokens, {"optim": "adafactor"}),
    "bert": Case(bert, sentences),
    "gpt2": Case(gpt2, tokens),
    "t5": Case(t5, tokens),
}
