"""Every optimizer, by what it takes to train it here, and a model that has something for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from .._support.small import losses as losses
from ..parity.models import seeded
from ..parity.sides import OURS, Side

Item = dict[str, Any]
CLASSES = 3
WORDS = 16
WIDTH = 64  # 64 x 64: from 4096 numbers on, states are kept in 8 and 4 bits


class Net(nn.Module):
    """An embedding, a matrix, a norm, a head, biases; dropout, so that random states matter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = self.norm(torch.relu(self.body(self.embed(ids).mean(1))))
        logits = self.head(self.dropout(hidden))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class Silent(Net):
    """Has gradients, and they are all zero: what moves the weights is decay alone."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        return {"loss": 0 * sum(p.sum() for p in self.parameters()), "logits": torch.zeros(len(ids), CLASSES)}


def sentences(size: int = 24) -> list[Item]:
    """The first word decides the label."""
    g = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, WORDS, (4,), generator=g) for _ in range(size)]
    return [{"ids": torch.cat([row[:1], row[:1], row]), "labels": int(row[0]) % CLASSES} for row in rows]


@dataclass(frozen=True)
class Row:
    """An optimizer that runs on a CPU.

    Attributes:
        module: to be importable; None where torch has it.
        lr: a rate at which it learns the sentences.
        in_backward: it updates weights during the backward pass.
        decays: it has decay groups.
    """

    name: str
    module: str | None = None
    lr: float = 1e-2
    settings: dict[str, Any] = field(default_factory=dict)
    in_backward: bool = False
    decays: bool = True

    def __str__(self) -> str:
        return self.name

    def args(self, **settings: Any) -> dict[str, Any]:
        return {"optim": self.name, "learning_rate": self.lr, **self.settings, **settings}

    def needs(self) -> None:
        if self.module is not None:
            pytest.importorskip(self.module, reason=f"optim={self.name!r} needs {self.module}")


PROJECTED: dict[str, Any] = {"optim_target_modules": ["body"], "optim_args": "rank=4,update_proj_gap=2"}
STEADY: dict[str, Any] = {"lr_scheduler_type": "constant"}
BNB = "bitsandbytes"
ROWS = [
    Row("adamw_torch"),
    Row("adamw_torch_fused"),
    Row("adafactor"),
    Row("sgd", lr=0.3, settings={"optim_args": "momentum=0.9"}),
    Row("adagrad"),
    Row("rmsprop", lr=1e-3, settings={"optim_args": "momentum=0.5"}),
    Row("muon"),
    Row("adamw_bf16"),
    Row("adamw_torch_4bit", "torchao"),
    Row("adamw_torch_8bit", "torchao"),
    *[Row(name, BNB) for name in ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit")],
    *[Row(name, BNB) for name in ("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit")],
    *[Row(name, BNB, lr=3e-3) for name in ("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit")],
    *[Row(name, BNB, lr=1e-3) for name in ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit")],
    *[Row(name, "galore_torch", settings=PROJECTED) for name in ("galore_adamw", "galore_adafactor")],
    Row("galore_adamw_layerwise", "galore_torch", settings=PROJECTED, in_backward=True),
    Row("galore_adafactor_layerwise", "galore_torch", settings=PROJECTED, in_backward=True),
    Row("apollo_adamw", "apollo_torch", settings=PROJECTED),
    Row("apollo_adamw_layerwise", "apollo_torch", settings=PROJECTED, in_backward=True),
    Row("lomo", "lomo_optim", lr=0.3, in_backward=True, decays=False),
    Row("grokadamw", "grokadamw", lr=3e-3),
    Row("schedule_free_radam", "schedulefree", lr=3e-2, settings=STEADY),
    Row("schedule_free_adamw", "schedulefree", settings=STEADY),
    Row("schedule_free_sgd", "schedulefree", lr=1.0, settings=STEADY),
    Row("stable_adamw", "optimi"),
]
# On a CPU these end in a clear error; on CUDA they train (test_gpu.py).
ON_CUDA = [
    Row("galore_adamw_8bit", "galore_torch", settings=PROJECTED),
    Row("galore_adamw_8bit_layerwise", "galore_torch", settings=PROJECTED, in_backward=True),
    Row("adalomo", "lomo_optim", lr=0.1, in_backward=True, decays=False),
]
# Of packages that are not in the registry, or for other hardware.
ELSEWHERE = ("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision")
OURS_ALONE = ("muon", "adamw_bf16")  # transformers has none of that name
EVERY_NAME = [*(row.name for row in (*ROWS, *ON_CUDA)), *ELSEWHERE]


def make_trainer(
    folder: Path | str, row: Row, side: Side = OURS, net: Callable[[], nn.Module] = Net, **settings: Any
) -> Any:
    """A trainer over the sentences, batches of 4. `callbacks` and the like go to the trainer."""
    names = ("callbacks", "optimizers", "optimizer_cls_and_kwargs", "eval_dataset")
    parts = {name: settings.pop(name) for name in names if name in settings}
    given = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "logging_steps": 1, "seed": 5}
    return side.make(seeded(net), Path(folder), row.args(**given | settings), train_dataset=sentences(), **parts)
