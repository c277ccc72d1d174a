"""Processes that train models in parts by Muon, in one launch: `muon.py FOLDER`. It tells what the tests compare."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests._support.two_processes import tell
from tests.distributed import mixtures
from tests.distributed.layouts import MODEL, in_parts, outcome_of_parts, trainer_of, whole

from trainwright.optim.own_optimizers import muon_lines

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SETTINGS = {"optim": "muon", "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
ON_EXPERTS = {**SETTINGS, "max_steps": 4}


def dense(name: str, model: Any, **more: Any) -> Any:
    replicas = 1 if "tp" in name else WORLD
    return trainer_of(model, FOLDER / name, replicas=replicas, **SETTINGS | more)


def experts(name: str, **sizes: int) -> Any:
    model = mixtures.loaded(FOLDER / mixtures.MODEL, **sizes)
    return mixtures.trainer_of(
        model, FOLDER / name, processes=WORLD, parts=mixtures.replicas(sizes) if sizes else 2, **ON_EXPERTS
    )


def make(name: str) -> Any:
    if name == "fsdp":
        return dense(name, whole(FOLDER / MODEL), fsdp=True)
    if name == "tp":
        return dense(name, in_parts(FOLDER / MODEL, tp_size=2))
    if name == "experts":
        return experts(name, fsdp_size=2, ep_size=2)
    return dense(name, in_parts(FOLDER / MODEL, dp_replicate_size=2, fsdp_size=2))


CELLS = {2: ("fsdp", "tp", "experts"), 4: ("hybrid",)}

if __name__ == "__main__":
    logging.getLogger("trainwright").setLevel("ERROR")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    torch.manual_seed(0)
    for cell in CELLS[WORLD]:
        trainer = make(cell)
        tell(
            **{cell: outcome_of_parts(trainer), f"{cell}: lines": muon_lines(trainer.optimizer, trainer.model_wrapped)}
        )
        saved = str(FOLDER / cell / "checkpoint-2")
        tell(**{f"{cell}: resumed": outcome_of_parts(make(cell), resume_from_checkpoint=saved)})
    tell(done=True)
