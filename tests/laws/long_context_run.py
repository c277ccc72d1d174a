"""One launch: `long_context_run.py FOLDER KIND CELLS...`; KIND is "cp", "sp", or one of them with " + fsdp"."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig

from tests._support.two_processes import tell
from tests.laws.long_context import outcome, trainer_of

FOLDER = Path(sys.argv[1])
WORLD = int(os.environ["WORLD_SIZE"])


def settings_of(kind: str) -> dict[str, Any]:
    """Settings of a kind, with `replicas` of `WORLD` processes; pairs share sequences, or fours ("cp 4")."""
    way, *with_fsdp = kind.split(" + ")
    name, _, size = way.partition(" ")
    together = int(size or 2)
    sizes: dict[str, Any] = {"parallelism_config": ParallelismConfig(**{f"{name}_size": together})}
    copies = {"dp_replicate_size": 2, f"{name}_size": together} | ({"dp_shard_size": 1} if name == "sp" else {})
    if with_fsdp == ["copies"]:
        sizes = {"parallelism_config": ParallelismConfig(**copies)}
    fsdp = {"fsdp": True} if with_fsdp else {}
    return {**sizes, **fsdp, "replicas": WORLD // together}


kind, *cells = sys.argv[2:]
logging.getLogger("trainwright").setLevel("ERROR")
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
torch.manual_seed(0)
for cell in cells:
    trainer = trainer_of(cell, FOLDER / cell.replace(", ", "-"), **settings_of(kind))
    tell(**{cell: outcome(trainer)})
tell(done=True)
