"""Models made in parts under ZeRO-3, in one launch: `zero_init.py FOLDER`. It tells what the tests compare."""

import gc
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests._support.small import StopAt
from tests._support.two_processes import tell
from tests.distributed.cases import judged
from tests.parity import data, models
from tests.parity.sides import OURS, without_clock
from transformers import GPT2LMHeadModel, ViTConfig, ViTForImageClassification
from transformers.integrations import is_deepspeed_zero3_enabled

import trainwright

TOTAL = 8
ALWAYS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "log_level": "error",
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "seed": 5,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 4,
    "adam_epsilon": 1e-4,  # the bias of an attention's keys has no gradient but for rounding, which Adam would scale up
}
# Nothing is so small that each process has it whole.
ZERO: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}


def arguments(folder: Path, num_processes: int, *, zero: dict[str, Any] | None = None, **more: Any) -> Any:
    config = {} if zero is None else {"deepspeed": {"zero_optimization": zero, "bf16": {"enabled": "auto"}}}
    size = {"per_device_train_batch_size": TOTAL // num_processes}
    return trainwright.TrainingArguments(str(folder), **ALWAYS | size | config | more)


def trainer_of(model: Any, args: Any) -> Any:
    items = data.sequences(17)
    return OURS.trainer(model=model, args=args, train_dataset=items, eval_dataset=items[:9])


def outcome(trainer: Any, **how: Any) -> dict[str, Any]:
    out = trainer.train(**how)
    weights = trainer._trainwright.services.engine.whole_weights(trainer.model)
    weights = trainer.model.state_dict() if weights is None else weights
    return {
        "weights": {name: value.double().flatten().tolist() for name, value in weights.items()},
        "log": without_clock(trainer.state.log_history),
        "step": out.global_step,
    }


def load(folder: Path) -> Any:
    return GPT2LMHeadModel.from_pretrained(folder / "start")


def sizes(model: Any) -> dict[str, int]:
    """Elements that this process holds, and those of the whole."""
    parameters = list(model.parameters())
    return {
        "held": sum(p.numel() + p.ds_tensor.numel() for p in parameters if hasattr(p, "ds_id")),
        "whole": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "spread": sum(hasattr(p, "ds_id") for p in parameters),
        "parameters": len(parameters),
    }


def trains(folder: Path, world: int) -> None:
    """Made in parts; judged and saved before any training, trained, stopped and taken up, trained a second time."""
    args = arguments(folder / "parts", world, zero=ZERO, save_strategy="steps", save_steps=2)
    assert is_deepspeed_zero3_enabled()
    model = load(folder)
    tell(sizes=sizes(model))
    trainer = trainer_of(model, args)
    trainer.save_model(str(folder / f"untrained{world}"))
    tell(before=judged(trainer), trainable=trainer.get_num_trainable_parameters())
    tell(trained=outcome(trainer), after=judged(trainer), flos=trainer.state.total_flos)
    trainer.save_model(str(folder / f"final{world}"))
    tell(second=outcome(trainer))

    mine = arguments(folder / f"stopped{world}", world, zero=ZERO, save_strategy="steps", save_steps=2)
    trainer = trainer_of(load(folder), mine)
    trainer.add_callback(StopAt(2))
    trainer.train()
    del trainer
    gc.collect()
    assert is_deepspeed_zero3_enabled()  # the arguments live
    for source in (f"stopped{world}", "stopped0", "stopped1"):
        again = trainer_of(load(folder), arguments(folder / "again", world, zero=ZERO))
        tell(**{f"from {source}": outcome(again, resume_from_checkpoint=str(folder / source / "checkpoint-2"))})


def made_anew(folder: Path, world: int) -> None:
    """Weights that no file has; the same in all processes."""
    args = arguments(folder / "anew", world, zero=ZERO)
    torch.manual_seed(3)
    model = GPT2LMHeadModel._from_config(load(folder).config)
    weights = trainer_of(model, args)._trainwright.services.engine.whole_weights(model)
    tell(anew={name: [value.mean().item(), value.std().item()] for name, value in weights.items()})


def saves_halves(folder: Path, world: int) -> None:
    for gathers in (True, False):
        zero = ZERO | {"stage3_gather_16bit_weights_on_model_save": gathers}
        args = arguments(
            folder / "halves", world, zero=zero, bf16=True, max_steps=2, save_strategy="steps", save_steps=1
        )
        trainer = trainer_of(load(folder), args)
        first = outcome(trainer)
        trainer.save_model(str(folder / f"halves{world} {gathers}"))
        again = trainer_of(load(folder), args)
        second = outcome(again, resume_from_checkpoint=str(folder / "halves/checkpoint-1"))
        tell(**{f"halves {gathers}": [first, second]})


def starts(folder: Path) -> None:
    """Weights that all begin with."""
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    models.seeded(lambda: models.gpt2(0.0)).save_pretrained(folder / "start")
    models.seeded(lambda: ViTForImageClassification(config)).save_pretrained(folder / "start of images")


def images() -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(2)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=g), "labels": i % 3} for i in range(8)]


def older_names(folder: Path, world: int) -> None:
    """A model whose files have the names of an older version."""
    losses = []
    for resume in (None, str(folder / "vit/checkpoint-1")):
        args = arguments(
            folder / "vit",
            world,
            zero=ZERO,
            max_steps=2,
            save_strategy="steps",
            save_steps=1,
            gradient_accumulation_steps=1,
        )
        model = ViTForImageClassification.from_pretrained(folder / "start of images")
        trainer = OURS.trainer(model=model, args=args, train_dataset=images())
        trainer.train(resume_from_checkpoint=resume)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])
    tell(older_names=losses)


def made_whole(folder: Path, world: int) -> None:
    """What was marked has gone with its arguments; a model that was made before its arguments is whole."""
    gc.collect()
    marked = [is_deepspeed_zero3_enabled()]
    model = load(folder)
    args = arguments(folder / "whole", world, zero=ZERO)
    marked.append(is_deepspeed_zero3_enabled())
    tell(whole_sizes=sizes(model), marked=marked, whole=outcome(trainer_of(model, args)))


if __name__ == "__main__":
    logging.getLogger("trainwright").setLevel("ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`")
    FOLDER = Path(sys.argv[1])
    WORLD = int(os.environ["WORLD_SIZE"])
    for case in (trains, made_anew, saves_halves, older_names, made_whole):
        case(FOLDER, WORLD)
