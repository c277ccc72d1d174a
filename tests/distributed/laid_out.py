"""Processes that share the layers of a model, in one launch: `laid_out.py FOLDER`. It tells what the tests compare."""

import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from accelerate import ParallelismConfig
from tests._support.small import StopAt
from tests._support.two_processes import tell
from tests.distributed.layouts import BY_ONE, MODEL, SAVED, in_parts, judged, outcome_of_parts, trainer_of, whole

from trainwright import Trainer

FOLDER = Path(sys.argv[1])
WORLD = int(os.environ["WORLD_SIZE"])
SIZES = {"tp_size": 2} if WORLD == 2 else {"tp_size": 2, "fsdp_size": 2}
REPLICAS = WORLD // 2


def new_trainer(name: str, **more: object) -> Trainer:
    return trainer_of(in_parts(FOLDER / MODEL, **SIZES), FOLDER / name, replicas=REPLICAS, **more)


def trains_like_one() -> None:
    asked = ParallelismConfig(tp_size=2, dp_shard_size=WORLD // 2)
    settings = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "epoch"}
    dispatched = {"dispatch_batches": True}  # without effect: processes that share layers read the same batches
    trainer = new_trainer("parts", parallelism_config=asked, accelerator_config=dispatched, **settings)
    tell(parts=outcome_of_parts(trainer))
    own = [part.to_local().numel() for part in trainer.model.parameters() if hasattr(part, "to_local")]
    tell(share=sum(own) / sum(part.numel() for part in trainer.model.parameters()))
    tell(judged=judged(trainer), files=sorted(os.listdir(FOLDER / "parts" / SAVED)))
    tell(total=trainer.get_total_train_batch_size(trainer.args), sizes=[trainer.get_tp_size(), trainer.get_cp_size()])
    tell(told_accelerate=trainer.accelerator.parallelism_config is asked)
    trainer.save_model(str(FOLDER / "final"))


def goes_on() -> None:
    for source in ("parts", BY_ONE):
        trainer = new_trainer(f"from_{source}")  # the model alone says how it is laid out
        tell(**{f"from {source}": outcome_of_parts(trainer, resume_from_checkpoint=str(FOLDER / source / SAVED))})


def best() -> None:
    trainer = new_trainer(
        "best",
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
    )
    trainer.train()
    seen = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    tell(best=[trainer.evaluate()["eval_loss"], seen])


def half_precision() -> None:
    trainer = new_trainer("half", bf16=True, max_steps=2)
    trainer.add_callback(StopAt(2))
    trainer.train()
    tell(half=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def refused() -> None:
    plan = {"parallelism_config": ParallelismConfig(tp_size=2, dp_shard_size=WORLD // 2)}
    three = {"parallelism_config": ParallelismConfig(tp_size=3)}
    cases = {
        "whole": lambda: trainer_of(whole(FOLDER / MODEL), FOLDER / "no", **plan).train(),
        "other size": lambda: new_trainer("no", **three),
        "fsdp": lambda: new_trainer("no", fsdp=True),
        "fp16": lambda: new_trainer("no", fp16=True),
        "launcher": lambda: trainer_of(
            whole(FOLDER / MODEL), FOLDER / "no", parallelism_config=ParallelismConfig(tp_size=5)
        ),
    }
    for name, attempt in cases.items():
        try:
            attempt()
        except Exception as error:
            tell(**{f"refused: {name}": f"{type(error).__name__}: {error}"})


logging.getLogger("trainwright").setLevel("ERROR")
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
torch.manual_seed(0)
for step in (trains_like_one, goes_on, *((best, half_precision, refused) if WORLD == 2 else ())):
    step()
tell(done=True)
