"""Processes under DeepSpeed, in one launch: `zero.py FOLDER`. It tells what the tests compare with one process."""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from tests._support.small import StopAt
from tests._support.two_processes import tell
from tests.distributed.cases import judged, library, outcome, trainer_of

FOLDER = Path(sys.argv[1])
WORLD = int(os.environ["WORLD_SIZE"])
SAVED = "means, accumulated"
WINDOWS = {2: "counted, accumulated", 3: "means"}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"deepspeed": {"zero_optimization": {"stage": stage}, "train_batch_size": "auto", **more}}


def told(trainer: Any, **how: Any) -> dict[str, Any]:
    """As `cases.outcome`, with the weights that are spread put together; only the main process has them."""
    return {**outcome(trainer, **how), "weights": whole(trainer)}


def whole(trainer: Any) -> dict[str, list[float]]:
    weights = trainer._trainwright.services.engine.whole_weights(trainer.model)
    weights = trainer.model.state_dict() if weights is None else weights
    return {name: value.double().flatten().tolist() for name, value in weights.items()}


def refusals() -> None:
    fights = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 1}}
    for name, config in {"fight": fights, "auto": {"zero_optimization": {"stage": "auto"}}}.items():
        try:
            trainer_of(SAVED, FOLDER / "refused", WORLD, deepspeed=config)
        except Exception as error:
            tell(**{name: f"{type(error).__name__}: {error}"})


logging.getLogger("trainwright").setLevel("ERROR")
warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`")
if WORLD > 1:
    refusals()
for stage, window in WINDOWS.items():
    trainer = trainer_of(window, FOLDER / "windows", WORLD, **zero(stage))
    tell(**{f"zero {stage}": told(trainer), f"zero {stage}: judged": judged(trainer)})
    mine = f"zero{stage}_by{WORLD}"
    trainer = trainer_of(SAVED, FOLDER / mine, WORLD, save_strategy="steps", save_steps=2, **zero(stage))
    trainer.add_callback(StopAt(2))
    trainer.train()
    for source in {mine: 0, "by_one": 0, f"zero{stage}_by1": 0}:
        again = trainer_of(SAVED, FOLDER / "again", WORLD, **zero(stage))
        tell(**{f"{stage} from {source}": told(again, resume_from_checkpoint=str(FOLDER / source / "checkpoint-2"))})
for stage in (0, 1, 2, 3):
    tell(**{f"library {stage}": library(FOLDER / f"library{stage}_by{WORLD}", WORLD, **zero(stage))})
own = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}
trainer = trainer_of("means", FOLDER / "own", WORLD, **zero(1, **own))
tell(
    own=told(trainer), own_second=told(trainer), kinds=[type(trainer.deepspeed).__name__, trainer.is_deepspeed_enabled]
)
compiled = trainer_of("means", FOLDER / "compiled", WORLD, torch_compile=True, **zero(2))
tell(compiled=told(compiled), is_compiled=compiled.deepspeed.is_compiled)
mixed = trainer_of(
    SAVED, FOLDER / "mixed", WORLD, bf16=True, save_strategy="steps", save_steps=2, **zero(3, bf16={"enabled": "auto"})
)
tell(mixed=told(mixed))
mixed.args.save_strategy = "no"
tell(mixed_second=told(mixed))
again = trainer_of(SAVED, FOLDER / "mixed_again", WORLD, bf16=True, **zero(3, bf16={"enabled": "auto"}))
tell(mixed_again=told(again, resume_from_checkpoint=str(FOLDER / "mixed/checkpoint-2")))
