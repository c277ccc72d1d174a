"""One launch: `long_context_run.py FOLDER CASE...`, each case "KIND: CELL"; it tells what each comes to.

KIND is "cp" or "sp", with the number of processes that share a sequence unless it is two ("cp 4"), and " + fsdp", or
" + copies" for two copies of a sharded model, or " + zero 2" for a stage of DeepSpeed, or what the model is loaded
with: " + tp", " + ep", " + tp ep". "tp" alone shares no sequence.
"""

import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig

from tests._support.two_processes import tell
from tests.laws.long_context import outcome, trainer_of
from tests.laws.long_context_kinds import zero

FOLDER = Path(sys.argv[1])
WORLD = int(os.environ["WORLD_SIZE"])
# What the model is loaded with, of which `fsdp_size` counts the processes that share a sequence too.
LOADED = {
    "tp": {"tp_size": 2, "fsdp_size": WORLD // 2},
    "ep": {"fsdp_size": WORLD, "ep_size": 2},
    "tp ep": {"tp_size": 2, "fsdp_size": WORLD // 2, "ep_size": WORLD},
}


def settings_of(kind: str) -> dict[str, Any]:
    """Settings of a kind, and its `replicas`."""
    if kind in LOADED:
        return {"sizes": LOADED[kind], "replicas": LOADED[kind].get("fsdp_size", 1)}
    way, _, more = kind.partition(" + ")
    name, _, size = way.partition(" ")
    together = int(size or 2)
    if more in LOADED:
        return {
            "parallelism_config": ParallelismConfig(**{f"{name}_size": together}),
            "sizes": LOADED[more],
            "replicas": LOADED[more].get("fsdp_size", 1) // together,
        }
    sizes = {f"{name}_size": together}
    if more == "copies":
        sizes |= {"dp_replicate_size": 2, "dp_shard_size": WORLD // together // 2}
    shards: dict[str, Any] = {"fsdp": True} if more else {}
    if more.startswith("zero"):
        shards = zero(int(more.removeprefix("zero ")))
    return {"parallelism_config": ParallelismConfig(**sizes), **shards, "replicas": WORLD // together}


logging.getLogger("trainwright").setLevel("ERROR")
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
torch.manual_seed(0)
for number, case in enumerate(sys.argv[2:]):
    kind, cell = case.split(": ")
    try:
        tell(**{case: outcome(trainer_of(cell, FOLDER / str(number), **settings_of(kind)))})
    except Exception as error:  # the same in all processes; the other cells are judged all the same
        tell(**{case: {"error": "".join(traceback.format_exception(error))}})
tell(done=True)
