"""Trains a Llama under FSDP2 with the plain loss and with the chunked one; run in two processes (test_chunked.py)."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.support import loss_kernels

from .._support.small import data, make_trainer, models, weights
from .._support.two_processes import tell

NUM_STEPS = 3
ROWS = 4  # tokens of a chunk
FSDP = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


class Counts(TorchDispatchMode):
    """Counts the gathers of parameters, and the chunks of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[op.name()] += 1
        return op(*args, **(kwargs or {}))


def trained(folder: Path, *, is_tied: bool, **settings: Any) -> dict[str, Any]:
    model = models.seeded(models.llama)
    if not is_tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    trainer = make_trainer(
        folder,
        model=model,
        train_dataset=data.sequences(48),
        fsdp=True,
        use_cpu=True,
        max_steps=NUM_STEPS,
        **settings,
    )
    with Counts() as counts:
        trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "gathers": counts.found["c10d::_allgather_base_"],
        "chunks": counts.found["aten::logsumexp"],
        "weights": {name: value.cpu() for name, value in weights(trainer.model).items()},
    }


WAYS: dict[str, dict[str, Any]] = {
    "untied": {"is_tied": False, "fsdp_config": FSDP},
    "tied": {"is_tied": True, "fsdp_config": FSDP},
    "by size": {"is_tied": False, "fsdp_config": {"min_num_params": 100}},
}


def main(name: str) -> None:
    folder = Path(os.environ["TOLD_FOLDER"])
    loss_kernels.ELEMENTS = ROWS * models.seeded(models.llama).config.vocab_size
    plain = trained(folder, **WAYS[name])
    chunked = trained(folder, loss_kernel="chunked", **WAYS[name])
    before = plain.pop("weights")
    after = chunked.pop("weights")
    gap = max((after[key] - value).abs().max().item() for key, value in before.items())
    tell(plain=plain, chunked=chunked, weight_gap=gap)
