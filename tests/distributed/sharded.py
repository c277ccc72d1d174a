"""Two processes that hold a model in parts, in one launch: `sharded.py FOLDER`. It tells what the tests compare."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import peft
import torch
from tests._support.small import StopAt
from tests._support.two_processes import tell
from tests.distributed.cases import library, trainer_of
from tests.distributed.shards import (
    CASES,
    FORMS,
    SAVED,
    adapter,
    judged_parts,
    outcome_of_parts,
    roberta,
    tied_model,
    tied_trainer,
)

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])


def trains_like_one() -> None:
    for case, (window, settings) in CASES.items():
        trainer = trainer_of(window, FOLDER / "windows", 2, **settings)
        tell(**{case: outcome_of_parts(trainer)})
        units = [type(module).__name__ for module in trainer.model_wrapped.modules()]
        tell(**{f"units {case}": sorted({unit for unit in units if unit.startswith("FSDP")})})
        if case == "full_shard":
            tell(size=sum(part.to_local().numel() for part in trainer.model.state_dict().values()))
            tell(judged=judged_parts(trainer))


def goes_on() -> None:
    """From checkpoints in each form, written here and by one process."""
    for form, config in FORMS.items():
        settings = {"fsdp": True, "fsdp_config": config}
        trainer = trainer_of(SAVED, FOLDER / form, 2, save_strategy="steps", save_steps=2, **settings)
        trainer.add_callback(StopAt(2))
        trainer.train()
        tell(**{f"{form}: saved": sorted(os.listdir(FOLDER / form / "checkpoint-2"))})
        for source in (form, "by_one"):
            again = trainer_of(SAVED, FOLDER / f"{form}_{source}", 2, **settings)
            told = outcome_of_parts(again, resume_from_checkpoint=str(FOLDER / source / "checkpoint-2"))
            tell(**{f"{form}: from {source}": told})
    other = trainer_of(SAVED, FOLDER / "no_shards", 2)
    tell(
        whole_from_parts=outcome_of_parts(other, resume_from_checkpoint=str(FOLDER / "SHARDED_STATE_DICT/checkpoint-2"))
    )


def hooks_for_libraries() -> None:
    tell(library=library(FOLDER / "library", 2, fsdp=True))


def best() -> None:
    settings = {
        "fsdp": True,
        "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"},
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    trainer = trainer_of(SAVED, FOLDER / "best", 2, **settings)
    trainer.train()
    tell(
        best=[
            trainer.state.best_global_step,
            trainer.evaluate()["eval_loss"],
            [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e],
        ]
    )


def library_models() -> None:
    trainer = tied_trainer(tied_model(), FOLDER / "tied", state_dict_type="SHARDED_STATE_DICT")
    trainer.train()
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    tell(tied=trainer.state.log_history[0]["loss"], kinds=[type(m).__name__ for m in trainer.model.transformer.h])
    masked = tied_trainer(roberta(), FOLDER / "roberta")
    masked.train()
    tell(roberta=masked.state.log_history[0]["loss"])
    tuned = tied_trainer(adapter(), FOLDER / "adapter")
    assert isinstance(tuned.model, peft.PeftModel)
    tuned.train()
    tuned.save_model()
    tell(adapter=tuned.state.log_history[0]["loss"])


def refused() -> None:
    for name, how in {"class": {"transformer_layer_cls_to_wrap": "GPT2Blok"}, "older": {"version": 1}}.items():
        try:
            tied_trainer(tied_model(), FOLDER / "refused", **how).train()
        except Exception as error:
            tell(**{f"refused {name}": f"{type(error).__name__}: {error}"})


logging.getLogger("trainwright").setLevel("ERROR")
torch.manual_seed(0)
steps: list[Any] = [trains_like_one, goes_on, hooks_for_libraries, best, library_models, refused]
for step in steps:
    step()
tell(done=True)
