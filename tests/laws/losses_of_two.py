"""Losses in two processes: `losses_of_two.py FOLDER ENGINE...`. It tells the logged losses of each row."""

import sys
from pathlib import Path
from typing import Any

import trainwright
from tests._support.two_processes import tell
from tests.laws.losses import ROWS, losses, make

NAMES = (
    "override ignores",
    "override uses",
    "override passes on",
    "loss function ignores",
    "loss function uses",
    "module ignores keywords",
    "module uses keywords",
    "wrapper of mean",
    "adapter, override ignores",
    "BERT",
)
LAYERS = {"transformer_layer_cls_to_wrap": "Linear"}
ENGINES: dict[str, dict[str, Any]] = {
    "whole": {},
    "fsdp": {"fsdp": True, "fsdp_config": LAYERS},
    "fsdp kept": {"fsdp": True, "fsdp_config": {**LAYERS, "reshard_after_forward": False}},
    "zero 3": {
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        }
    },
}


if __name__ == "__main__":
    for engine in sys.argv[2:]:
        for name in NAMES:
            row = ROWS[name]
            for micro_batches in (1, 2):
                settings = {**row.settings, **ENGINES[engine]}
                trainer = make(
                    trainwright,
                    row,
                    Path(sys.argv[1]) / engine,
                    batch=4 // micro_batches,
                    micro_batches=micro_batches,
                    **settings,
                )
                trainer.train()
                tell(**{f"{engine}: {name}: {micro_batches}": losses(trainer)})
