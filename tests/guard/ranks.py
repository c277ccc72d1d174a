"""Two processes of which one has a bad sample: what each of them does, against a run in which that step is left out."""

import sys
from pathlib import Path
from typing import Any

import torch

from tests._support.two_processes import tell
from tests.guard.poisoned import BATCH, POISONS, Hears, LeavesOut, trained

FOLDER, BAD_STEP, RANKS = Path(sys.argv[1]), 2, 2
BACKENDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "Linear"}},
}


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer.model_wrapped.state_dict()
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}


def row_of(rank: int) -> int:
    """The first row of the bad step for the first process, the last one for the last."""
    return (BAD_STEP - 1) * BATCH * RANKS + rank * (BATCH * RANKS - 1)


for backend, settings in BACKENDS.items():
    shared = {"max_steps": 4, "logging_steps": 4, **settings}
    hand = state_of(trained(FOLDER / backend / "hand", settings=shared, callbacks=[LeavesOut(BAD_STEP)]))
    for rank in range(RANKS):
        for kind in ("nan", "loss-alone", "gradient-alone"):
            hears = Hears()
            poison, folder = {row_of(rank): POISONS[kind]}, FOLDER / backend / kind / str(rank)
            one = trained(folder, poison=poison, settings=shared, callbacks=[hears])
            found = state_of(one)
            same = all(torch.equal(found[name], hand[name]) for name in hand)
            tell(**{f"{backend}, {kind}, rank {rank}": [same, [incident.step for incident in hears.incidents]]})
