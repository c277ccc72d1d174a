"""A small mixture of experts, whole or with its experts shared out, and its runs; used by a script and its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tests.distributed.layouts import outcome_of_parts
from tests.parity import models
from tests.parity.sides import OURS

from trainwright.capabilities.experts.extension import ExpertLoad

MODEL = "mixture"
SAVED = "checkpoint-2"
EXPERTS = 8
TOTAL = 8  # samples in a micro-batch of all processes

# Number of processes -> name -> sizes of the model.
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "tp2 ep2": {"tp_size": 2, "ep_size": 2},
        "fsdp2 ep2": {"fsdp_size": 2, "ep_size": 2},
        "fsdp2": {"fsdp_size": 2},
    },
    4: {
        "tp2 fsdp2 ep2": {"tp_size": 2, "fsdp_size": 2, "ep_size": 2},
        "tp2 fsdp2 ep4": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        "fsdp4 ep2": {"fsdp_size": 4, "ep_size": 2},
        "fsdp4 ep4": {"fsdp_size": 4, "ep_size": 4},
        "hsdp ep2": {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
    },
}
# Rows, and how they are accumulated -> accumulated micro-batches of all processes.
CASES: dict[str, int] = {"packed": 1, "packed, accumulated": 4, "padded": 1, "padded, accumulated": 4}


def replicas(sizes: dict[str, int]) -> int:
    return sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)


def write_model(folder: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    models.seeded(lambda: transformers.Qwen3MoeForCausalLM(config)).save_pretrained(folder)


def loaded(folder: Path, **sizes: Any) -> Any:
    how = {"distributed_config": transformers.DistributedConfig(**sizes)} if sizes else {}
    return transformers.Qwen3MoeForCausalLM.from_pretrained(folder, **how)


def padded_texts(size: int) -> list[dict[str, Any]]:
    """Texts of unequal length, padded on the right; of each eight, two have no label, which may be all of a process."""
    generator = torch.Generator().manual_seed(4)
    rows = []
    for i in range(size):
        ids = torch.randint(1, 64, (12,), generator=generator)
        mask = torch.ones_like(ids)
        mask[12 - i % 5 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        if i % 8 < 2:
            labels[:] = -100
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return rows


def packed_texts(size: int) -> list[dict[str, Any]]:
    """Rows of two or three samples, told apart by positions that begin again; of each eight, two have no label."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for i in range(size):
        first = 3 + i % 5
        lengths = [first, 12 - first] if i % 2 else [first, 4, 8 - first]
        ids = torch.randint(1, 64, (12,), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])
        labels = ids.masked_fill(positions == 0, -100)
        if i % 8 < 2:
            labels[:] = -100
        rows.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return rows


TEXTS = {"packed": packed_texts, "padded": padded_texts}


def trainer_of(
    model: Any,
    folder: Path,
    *,
    processes: int = 1,
    parts: int = 1,
    window: int = 2,
    texts: str = "padded",
    **more: Any,
) -> Any:
    """A trainer of a micro-batch of `TOTAL` samples, which processes or the accumulation of one have in `parts`.

    With as many parts one process has the same micro-batches, and so the same auxiliary losses, as several.
    """
    settings = {
        "per_device_train_batch_size": TOTAL // parts,
        "per_device_eval_batch_size": 4,
        "seed": 5,
        "gradient_accumulation_steps": window if processes > 1 else window * parts,
        "optim": "sgd",
        "learning_rate": 0.5,
        "logging_steps": 1,
        "max_steps": 4,
        "max_grad_norm": 0.5,
    }
    rows = TEXTS[texts](TOTAL * 8)
    trainer = OURS.make(model, folder, settings | more, train_dataset=rows, eval_dataset=rows[:9])
    trainer.add_extension(ExpertLoad())
    return trainer


def judged(trainer: Any) -> dict[str, Any]:
    """Of nine texts, in batches of four: the logits are one of the model's outputs, beside those of the router."""
    predicted = trainer.predict(trainer.eval_dataset)
    logits = next(one for one in predicted.predictions if getattr(one, "shape", ())[-1:] == (64,))
    return {"logits": logits.tolist(), "labels": predicted.label_ids.tolist()}


def outcome(trainer: Any, **how: Any) -> dict[str, Any]:
    return outcome_of_parts(trainer, **how)
