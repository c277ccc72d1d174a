"""Processes that share out the experts of a model: `experts.py FOLDER STEP [LAYOUT ...]`. It tells what they did."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests._support.small import StopAt
from tests._support.two_processes import tell
from tests.distributed.mixtures import CASES, LAYOUTS, MODEL, SAVED, judged, loaded, outcome, replicas, trainer_of

FOLDER = Path(sys.argv[1])
WORLD = int(os.environ["WORLD_SIZE"])
SIZES = {name: sizes for name, sizes in LAYOUTS[WORLD].items() if len(sys.argv) < 4 or name in sys.argv[3:]}
IN_PARTS = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
SAVING = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2}


def new_trainer(layout: str, name: str, **more: Any) -> Any:
    sizes = SIZES[layout]
    return trainer_of(loaded(FOLDER / MODEL, **sizes), FOLDER / name, processes=WORLD, parts=replicas(sizes), **more)


def trains_like_one() -> None:
    for layout in SIZES:
        for case, window in CASES.items():
            trainer = new_trainer(layout, "train", window=window, texts=case.split(",")[0])
            tell(**{f"{layout}: {case}": outcome(trainer)})
        tell(**{f"{layout}: judged": judged(trainer)})
        experts = {
            n: p.to_local().shape[0]
            for n, p in trainer.model.named_parameters()
            if n.endswith("down_proj") and p.ndim == 3
        }
        tell(**{f"{layout}: experts": sorted(set(experts.values()))})


def goes_on() -> None:
    """From checkpoints whole and in parts, of this layout, of another, and of one process."""
    layouts = list(SIZES)
    for number, layout in enumerate(layouts):
        for form, config in {"whole": {}, "parts": IN_PARTS}.items():
            trainer = new_trainer(layout, f"{layout} {form}", **SAVING, **config)
            trainer.add_callback(StopAt(2))
            trainer.train()
            tell(**{f"{layout}: {form} files": sorted(os.listdir(FOLDER / f"{layout} {form}" / SAVED))})
        tell(**{f"{layout}: uninterrupted": outcome(new_trainer(layout, "on", **SAVING))})
        for form in ("whole", "parts"):
            again = new_trainer(layout, "again", **SAVING)
            told = outcome(again, resume_from_checkpoint=str(FOLDER / f"{layout} {form}" / SAVED))
            tell(**{f"{layout}: from {form}": told})
        other = layouts[number - 1]
        if number:
            again = new_trainer(layout, "other", **SAVING)
            told = outcome(again, resume_from_checkpoint=str(FOLDER / f"{other} parts" / SAVED))
            tell(**{f"{layout}: from another": told})
        again = new_trainer(layout, "by_one", **SAVING)
        tell(**{f"{layout}: from one": outcome(again, resume_from_checkpoint=str(FOLDER / "by_one" / SAVED))})
    trainer.save_model(str(FOLDER / "final"))


def refused() -> None:
    sizes = {"tp_size": 2, "ep_size": 2, "ep_implementation": "deepgemm_megamoe"}
    try:
        trainer_of(loaded(FOLDER / MODEL, **sizes), FOLDER / "no")
    except Exception as error:
        tell(megamoe=f"{type(error).__name__}: {error}")


logging.getLogger("trainwright").setLevel("ERROR")
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
torch.manual_seed(0)
{"trains_like_one": trains_like_one, "goes_on": goes_on, "refused": refused}[sys.argv[2]]()
tell(done=True)
