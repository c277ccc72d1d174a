"""Runs on the stand-in, each beside the same run on the CPU; they run in processes of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model

import trainwright
from trainwright import LossOutput
from trainwright.checkpoint import deferred_io
from trainwright.checkpoint.deferred_io import HostBuffers

from .._support import standin
from .._support.small import data, differing, make_trainer, models, module, weights
from .._support.standin.device import MEMORY

ON_CPU = {"use_cpu": True}
ON_ACCEL = {"use_cpu": False}


def causal(size: int = 26) -> dict[str, Any]:
    return {"model": models.seeded(models.llama), "train_dataset": data.sequences(size)}


def lora() -> dict[str, Any]:
    torch.manual_seed(3)
    model = get_peft_model(models.seeded(models.llama), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    return {**causal(), "model": model}


def evaluated() -> dict[str, Any]:
    return {**causal(), "eval_dataset": data.sequences(6)}


class SaysItems(trainwright.Trainer):
    """Its loss says over how many labels it is a mean, and it records a number of each micro-batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **how: Any) -> Any:
        how.pop("num_items_in_batch", None)
        outputs = model(**inputs)
        items = (inputs["labels"] != -100).sum()
        self.record("widest", outputs["logits"].abs().max(), reduce="max")
        loss = LossOutput(outputs["loss"], num_items=items, metrics={"mine": outputs["loss"].detach()})
        return (loss, outputs) if return_outputs else loss


def sources() -> dict[str, Any]:
    rows = data.sequences(26)
    return {"model": models.seeded(models.llama), "train_dataset": {"a": rows[:13], "b": rows[13:]}}


# Name -> parts of a trainer, and settings.
FEATURES: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "plain": (causal, {}),
    "module": (lambda: {"model": module(dropout=0.0)}, {}),
    "no-clipping": (causal, {"max_grad_norm": 0.0}),
    "accumulation": (causal, {"gradient_accumulation_steps": 8, "num_train_epochs": 8}),
    "guards": (causal, {"on_nonfinite": "skip", "on_spike": "warn", "spike_warmup": 4}),
    "guards-warn": (causal, {"on_nonfinite": "warn"}),
    "no-guards": (causal, {"on_nonfinite": "ignore"}),
    "ledger": (causal, {"ledger": True}),
    "mixture": (sources, {"mixture": {"a": 0.7, "b": 0.3}}),
    "loss-output": (lambda: {**causal(), "cls": SaysItems}, {"gradient_accumulation_steps": 2}),
    "lora": (lora, {}),
    "packing": (causal, {"packing": "best_fit", "packing_length": 24}),
    "chunked-loss": (causal, {"loss_kernel": "chunked"}),
    "checkpointed-activations": (causal, {"activation_checkpointing": True}),
    "workers": (causal, {"dataloader_num_workers": 1}),
    "evaluation": (
        lambda: {**causal(), "eval_dataset": data.sequences(6)},
        {"eval_strategy": "steps", "eval_steps": 3},
    ),
    "sgd": (causal, {"optim": "sgd"}),
    "adamw-by-hand": (causal, {"optim": "adamw_torch"}),
    "tokens": (causal, {"include_num_input_tokens_seen": "non_padding"}),
}


def make(folder: Path, name: str, **settings: Any) -> Any:
    parts, own = FEATURES[name]
    return make_trainer(folder, **parts(), **(own | settings))


def on_both(folder: Path, name: str) -> dict[str, Any]:
    """Returns how a run on the stand-in differs from the run on the CPU, whose kernels compute both."""
    found = {}
    for device, where in (("cpu", ON_CPU), ("accel", ON_ACCEL)):
        trainer = make(folder / device, name, **where)
        trainer.train()
        assert trainer.args.device.type == device
        assert {parameter.device.type for parameter in trainer.model.parameters()} == {device}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        values = {key: value.cpu() for key, value in weights(trainer.model).items()}
        evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        found[device] = (losses, values, evaluations)
    cpu = found["cpu"]
    accel = found["accel"]
    gaps = {key: (cpu[1][key] - accel[1][key]).abs().max().item() for key in cpu[1]}
    return {
        "num_losses": len(cpu[0]),
        "loss_gap": max(abs(one - other) for one, other in zip(cpu[0], accel[0], strict=True)),
        "eval_gap": max((abs(one - other) for one, other in zip(cpu[2], accel[2], strict=True)), default=0.0),
        "weight_gap": max(gaps.values()),
        "freed_early": MEMORY.freed_early,
    }


# -- resume ------------------------------------------------------------------------------------------------------------


def resumed(folder: Path, settings: dict[str, Any], old_file: bool = False) -> dict[str, Any]:
    """Compares a run with dropout on the device, and a collator that draws, with the same run cut off at step 4.

    `old_file`: the states of the device are taken out of the file, as version 0.2 wrote it.
    """
    always = ON_ACCEL | {"max_steps": 9, "save_strategy": "steps", "save_steps": 4} | settings
    whole = make_trainer(folder / "whole", **always)
    whole.train()
    checkpoint = folder / "whole" / "checkpoint-4"
    states = torch.load(checkpoint / "rng_state.pth", weights_only=True)
    if old_file:
        from .._support.small import sign_again

        del states["accel"]
        torch.save(states, checkpoint / "rng_state.pth")
        sign_again(checkpoint)
    torch.manual_seed(123)  # the generators are elsewhere when the run goes on
    torch.rand(7, device="accel")
    later = make_trainer(folder / "later", **always)
    later.train(resume_from_checkpoint=str(checkpoint))
    gaps = [(value - weights(later.model)[name]).abs().max().item() for name, value in weights(whole.model).items()]
    return {
        "keys": sorted(states),
        "kind": type(states.get("accel")).__name__,
        "weight_gap": max(gaps),
        "steps": later.state.global_step,
    }


# -- saves -------------------------------------------------------------------------------------------------------------


def saved_while_training(folder: Path, settings: dict[str, Any], room: list[bool | None]) -> dict[str, Any]:
    """Compares the weights and the optimizer's state in checkpoints with those at the end of their steps."""
    seen: dict[int, dict[str, torch.Tensor]] = {}
    moments: dict[int, list[torch.Tensor]] = {}

    waited: set[int] = set()
    wait = HostBuffers._wait

    def free_bytes(device: torch.device) -> int:
        has_room = room[min(trainer.state.global_step // 2, len(room)) - 1]
        return 0 if has_room is False else 1 << 40

    def is_waiting(buffers: HostBuffers, *storages: torch.UntypedStorage) -> bool:
        standin.limit_memory(standin.used_bytes() if room == [None] else None)
        made = wait(buffers, *storages)
        standin.limit_memory(None)
        waited.update([trainer.state.global_step] * made)
        return made

    class Looks(trainwright.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen[state.global_step] = {name: value.cpu() for name, value in model.state_dict().items()}
            states = kwargs["optimizer"].state.values()
            moments[state.global_step] = [one["exp_avg"].cpu() for one in states]

    trainer = make_trainer(
        folder, callbacks=[Looks()], **ON_ACCEL, max_steps=8, save_strategy="steps", save_steps=2, **settings
    )
    with patch.object(deferred_io, "free_bytes", free_bytes), patch.object(HostBuffers, "_wait", is_waiting):
        trainer.train()
    wrong = []
    for step in (2, 4, 6, 8):
        checkpoint = folder / f"checkpoint-{step}"
        there = _weights_of(checkpoint)
        wrong += [f"{step} {name}" for name, value in seen[step].items() if not torch.equal(value, there[name])]
        states = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)["state"]
        pairs = zip(moments[step], states.values(), strict=True)
        wrong += [f"{step} state" for mine, other in pairs if not torch.equal(mine, other["exp_avg"].cpu())]
    return {"wrong": wrong, "waited_on_device": sorted(waited), "freed_early": MEMORY.freed_early}


def _weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    import safetensors.torch

    path = checkpoint / "model.safetensors"
    if path.is_file():
        return safetensors.torch.load_file(path)
    return torch.load(checkpoint / "pytorch_model.bin", weights_only=True)  # type: ignore[no-any-return]


# -- errors of the device ----------------------------------------------------------------------------------------------


class Breaks(trainwright.TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        MEMORY.is_broken = state.global_step == 5


def broken_and_resumed(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Compares a run whose device fails for good in step 6, and its resume, with a run on a device that works."""
    always = ON_ACCEL | {"max_steps": 8, "save_strategy": "steps", "save_steps": 2} | settings
    whole = make_trainer(folder / "whole", **always)
    whole.train()
    error = ""
    try:
        make_trainer(folder / "broken", callbacks=[Breaks()], **always).train()
    except torch.AcceleratorError as failure:
        error = str(failure)
    MEMORY.is_broken = False  # in the place of a new process
    left = sorted(path.name for path in (folder / "broken").glob("*checkpoint-*"))
    again = make_trainer(folder / "broken", **always)
    again.train(resume_from_checkpoint="auto")
    return {"error": error, "left": left, "differing": sorted(differing(weights(again.model), weights(whole.model)))}


# -- fp16 --------------------------------------------------------------------------------------------------------------

OVERFLOWING = (2, 5, 6)  # steps whose gradients overflow


class Overflows(trainwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **how: Any) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, **how)
        return loss * 1e6 if self.state.global_step + 1 in OVERFLOWING else loss


def overflowed(folder: Path, optimizer: str) -> dict[str, Any]:
    """Returns the rates that the steps of a run in fp16 used and saved, some of whose updates are skipped."""
    rates: list[float] = []
    changed: list[bool] = []

    class Looks(trainwright.TrainerCallback):
        before: torch.Tensor

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.before = kwargs["model"].lm_head.weight.detach().clone()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            changed.append(not torch.equal(self.before, kwargs["model"].lm_head.weight))

    class Rates(Overflows):
        def _get_learning_rate(self) -> float:  # asked after each update, before the schedule moves on
            rates.append(super()._get_learning_rate())
            return rates[-1]

    settings = ON_ACCEL | {"fp16": True, "max_steps": 8, "logging_steps": 4, "save_strategy": "steps", "save_steps": 5}
    parts = {"cls": Rates, "optim": optimizer, "learning_rate": 0.8, "callbacks": [Looks()]}
    trainer = make_trainer(folder / "whole", **causal(), **parts, **settings)
    trainer.train()
    checkpoint = folder / "whole" / "checkpoint-5"
    saved = torch.load(checkpoint / "scheduler.pt", weights_only=True)["last_epoch"]
    later = make_trainer(folder / "later", **causal(), **parts, **settings)
    later.train(resume_from_checkpoint=str(checkpoint))
    whole = weights(trainer.model)
    resumed_weights = weights(later.model)
    return {
        "rates": rates[:8],
        "changed": changed[:8],
        "logged": [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry],
        "saved": saved,
        "last": trainer.lr_scheduler.get_last_lr()[0],
        "weight_gap": max((value - resumed_weights[name]).abs().max().item() for name, value in whole.items()),
    }


# -- memory ------------------------------------------------------------------------------------------------------------


def finds_a_batch_size(folder: Path) -> dict[str, Any]:
    """Trains with a limit under which batches of 16 do not fit, after a run without one has shown what they need."""
    peaks = {}
    losses = {}
    for size in (2, 16):
        standin.limit_memory(None)
        MEMORY.peak = MEMORY.used
        trainer = make_trainer(
            folder / str(size), **causal(64), **ON_ACCEL, per_device_train_batch_size=size, max_steps=6
        )
        trainer.train()
        losses[size] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        peaks[size] = MEMORY.peak
        del trainer
    limit = (peaks[2] + peaks[16]) // 2
    standin.limit_memory(limit)
    trainer = make_trainer(
        folder / "found",
        **causal(64),
        **ON_ACCEL,
        per_device_train_batch_size=16,
        max_steps=6,
        auto_find_batch_size=True,
    )
    trainer.train()
    standin.limit_memory(None)
    return {
        "peaks": peaks,
        "limit": limit,
        "steps": trainer.state.global_step,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "whole": losses[16],
    }


def memory_metrics(folder: Path) -> dict[str, Any]:
    """Returns the metrics of memory that a run reports."""
    trainer = make_trainer(folder, **causal(), **ON_ACCEL, skip_memory_metrics=False, max_steps=3)
    metrics = trainer.train().metrics
    return {name: value for name, value in metrics.items() if "_mem_gpu_" in name}


# -- loops of one's own, search ----------------------------------------------------------------------------------------


def driven(folder: Path) -> dict[str, Any]:
    """Compares a loop by `steps()` on the stand-in with `train()` there."""
    plain = make_trainer(folder / "plain", **causal(), **ON_ACCEL, max_steps=6)
    plain.train()
    trainer = make_trainer(folder / "driven", **causal(), **ON_ACCEL, max_steps=6)
    for step in trainer.steps():
        for batch in step.batches:
            loss = trainer.compute_loss(step.model, batch, num_items_in_batch=step.num_items)
            step.backward(loss)
        step.update()
    gaps = [(value - weights(trainer.model)[name]).abs().max().item() for name, value in weights(plain.model).items()]
    return {"weight_gap": max(gaps), "steps": trainer.state.global_step}


def searched(folder: Path) -> dict[str, Any]:
    """Returns the rates that a search of two trials on the stand-in tried."""
    logging.getLogger("optuna").setLevel(logging.ERROR)
    trainer = make_trainer(
        folder,
        model_init=lambda: models.seeded(models.llama),
        train_dataset=data.sequences(12),
        eval_dataset=data.sequences(4),
        **ON_ACCEL,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=3,
    )
    rates = [1e-3, 1e-2]
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
        n_trials=2,
        direction="minimize",
        backend="optuna",
    )
    return {"objective": best.objective, "device": trainer.args.device.type}


def tied(folder: Path) -> dict[str, Any]:
    """Returns whether tied weights are one parameter after training on a device that makes new ones in a move."""
    bare = models.seeded(models.llama).to("accel")
    trainer = make_trainer(folder, **causal(), **ON_ACCEL, max_steps=2)
    trainer.train()
    model = trainer.model
    return {
        "without us": bare.lm_head.weight is bare.model.embed_tokens.weight,
        "is_one": model.lm_head.weight is model.model.embed_tokens.weight,
        "num_trained": sum(len(group["params"]) for group in trainer.optimizer.param_groups),
        "num_parameters": len(list(model.parameters())),
    }
