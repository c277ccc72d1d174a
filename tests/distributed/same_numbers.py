"""Trains on both sides in the same processes, row by row, and tells where they differ: `same_numbers.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import torch
from tests._support.two_processes import tell
from tests.parity import data, models
from tests.parity.sides import OURS, REFERENCE, Outcome, Side, differing

FOLDER = Path(sys.argv[1])
ALWAYS = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 2, "max_steps": 8, "seed": 7}

ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipped": {"max_grad_norm": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "every batch synchronised": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
    "settings of ddp": {
        "ddp_find_unused_parameters": False,
        "ddp_bucket_cap_mb": 1,
        "ddp_broadcast_buffers": False,
        "ddp_backend": "gloo",
        "ddp_timeout": 600,
    },
    "static graph": {"ddp_static_graph": True, "ddp_find_unused_parameters": False},
    "half precision": {"bf16": True},
}


def trained(side: Side, settings: dict[str, Any], name: str) -> tuple[Outcome, Any]:
    model = models.seeded(lambda: models.ReturnsDict(0.1))
    trainer = side.make(model, FOLDER / side.name / name, ALWAYS | settings, train_dataset=data.vectors(64))
    return side.train(trainer), trainer


def settings_of_ddp(trainer: Any) -> list[Any]:
    wrapped = trainer.model_wrapped
    names = (
        "find_unused_parameters",
        "broadcast_buffers",
        "bucket_bytes_cap",
        "static_graph",
        "require_forward_param_sync",
    )
    return [getattr(wrapped, name) for name in names]


for name, settings in ROWS.items():
    torch.manual_seed(123)
    (ours, our_trainer), (theirs, their_trainer) = (trained(side, settings, name) for side in (OURS, REFERENCE))
    tell(
        **{
            name: {
                "weights": differing(ours.weights, theirs.weights),
                "logs": [ours.log[:-1], theirs.log[:-1]],
                "steps": [ours.global_step, theirs.global_step],
                "ddp": [settings_of_ddp(our_trainer), settings_of_ddp(their_trainer)],
                "final": [float(p.sum()) for p in ours.weights.values()],
            }
        }
    )
