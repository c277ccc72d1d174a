"""Processes that train an adapter on a model in parts: `adapters.py FOLDER`. It tells what the tests compare."""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tests._support.small import StopAt
from tests._support.two_processes import tell
from tests.distributed import mixtures
from tests.distributed.layouts import MODEL, SAVED, in_parts, judged, trainer_of
from tests.parity.sides import without_clock

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ATTENTION = ["q_proj", "v_proj", "o_proj"]
TARGETS = [*ATTENTION, "down_proj"]  # cut by columns, and by rows
LAYOUTS = {
    2: {"tp2": {"tp_size": 2}, "fsdp2": {"fsdp_size": 2}},
    4: {"fsdp4": {"fsdp_size": 4}},
}
WRONG = {
    "tp2 fsdp2": {"tp_size": 2, "fsdp_size": 2},
    "hsdp": {"dp_replicate_size": 2, "fsdp_size": 2},
}
SETTINGS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
ON_EXPERTS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def adapted(model: Any, folder: Path) -> Any:
    """A model with the adapter of a folder."""
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)


def write_adapter(model: Any, folder: Path, targets: Sequence[str] = TARGETS) -> None:
    """An adapter that changes what the model computes: its second matrices are not zero."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), lora_dropout=0.0)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def adapter_of(trainer: Any, **how: Any) -> dict[str, Any]:
    out = trainer.train(**how)
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in trained.items()}
    return {
        "weights": {name: value.double().flatten().tolist() for name, value in whole.items()},
        "log": without_clock(trainer.state.log_history),
        "step": out.global_step,
    }


def trains_like_one(layout: str, sizes: dict[str, int]) -> None:
    replicas = sizes.get("fsdp_size", 1)

    def new(name: str, **more: Any) -> Any:
        model = adapted(in_parts(FOLDER / MODEL, **sizes), FOLDER / "adapter")
        return trainer_of(model, FOLDER / name, replicas=replicas, **SETTINGS | more)

    trainer = new(layout)
    tell(**{layout: adapter_of(trainer), f"{layout}: judged": judged(trainer)})
    tell(**{f"{layout}: files": sorted(os.listdir(FOLDER / layout / SAVED))})
    for source in (layout, "by_one"):
        told = adapter_of(new("again"), resume_from_checkpoint=str(FOLDER / source / SAVED))
        tell(**{f"{layout}: from {'itself' if source == layout else 'one'}": told})
    trainer.save_model(str(FOLDER / f"{layout} final"))


def on_experts() -> None:
    """The attention of a mixture of experts is adapted, and its experts, which processes share out, are not."""
    model = mixtures.loaded(FOLDER / mixtures.MODEL, fsdp_size=2, ep_size=2)
    model = adapted(model, FOLDER / "adapter of the mixture")
    trainer = mixtures.trainer_of(model, FOLDER / "experts", processes=WORLD, parts=2, **ON_EXPERTS)
    try:
        of_experts = peft.LoraConfig(r=2, target_modules=["down_proj"])
        wrong = peft.get_peft_model(mixtures.loaded(FOLDER / mixtures.MODEL, fsdp_size=2, ep_size=2), of_experts)
        mixtures.trainer_of(wrong, FOLDER / "no", processes=WORLD, parts=2).train()
    except Exception as error:
        tell(refused=f"{type(error).__name__}: {error}")
    tell(experts=adapter_of(trainer), files_of_experts=sorted(os.listdir(FOLDER / "experts" / "checkpoint-2")))


def refused() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    for name, sizes in WRONG.items():
        try:
            model = peft.get_peft_model(in_parts(FOLDER / MODEL, **sizes), config)
            trainer_of(model, FOLDER / "no", replicas=2).train()
        except Exception as error:
            tell(**{f"refused: {name}": f"{type(error).__name__}: {error}"})


def best() -> None:
    """The best adapter is loaded back, and an adapter that a process made by itself becomes the first one's."""
    torch.manual_seed(WORLD + int(os.environ["RANK"]))
    model = in_parts(FOLDER / MODEL, fsdp_size=2)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0))
    kinds = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    how = {"save_strategy": "epoch", "eval_strategy": "epoch", **kinds}
    trainer = trainer_of(model, FOLDER / "best", replicas=2, **how)
    trainer.add_callback(StopAt(100))
    trainer.train()
    seen = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    own = {name: p.detach().sum().item() for name, p in trainer.model.named_parameters() if p.requires_grad}
    tell(best=[trainer.evaluate()["eval_loss"], seen], alike=own)


if __name__ == "__main__":
    logging.getLogger("trainwright").setLevel("ERROR")
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
    torch.manual_seed(0)
    for one, its_sizes in LAYOUTS[WORLD].items():
        trains_like_one(one, its_sizes)
    for step in (on_experts, best) if WORLD == 2 else (refused,):
        step()
    tell(done=True)
