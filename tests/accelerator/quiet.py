"""Waits of the host and launches of a step on the stand-in, of a trainer and of a loop written by hand."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import trainwright
from trainwright.capabilities.guard.checks import look_at_waits

from .._support import standin
from .._support.small import data, make_trainer
from .quiet_limits import FIRST, LAST
from .runs import FEATURES, causal, lora

COUNTS = standin.COUNTS
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
Found = dict[str, Any]


def _found() -> Found:
    num_steps = LAST - FIRST
    return {
        "waits": dict(COUNTS.waits),
        "behind": dict(COUNTS.behind),
        "pageable": COUNTS.pageable,
        "launches": COUNTS.num_launches / num_steps,
        "by_name": {name: count / num_steps for name, count in COUNTS.launches.items()},
    }


class Counting(trainwright.TrainerCallback):
    """Counts from the end of one step to the end of a later one."""

    found: Found

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == FIRST:
            COUNTS.clear()
        elif state.global_step == LAST:
            self.found = _found()


def of_trainer(folder: Path, name: str, precision: str, **settings: Any) -> Found:
    """Counts a run of a feature, and what is said about its waits."""
    parts, own = FEATURES[name]
    counting = Counting()
    always = {"use_cpu": False, "max_steps": LAST + 1, "logging_steps": LAST + 1, "num_train_epochs": 1}
    trainer = make_trainer(folder, **parts(), callbacks=[counting], **(own | always | PRECISIONS[precision] | settings))
    trainer.train()
    assert not any(torch.isnan(value).any() for value in trainer.model.state_dict().values())
    facts = SimpleNamespace(args=trainer.args, device=trainer.args.device, optimizer=trainer.optimizer)
    return {**counting.found, "said": [one.cure for one in look_at_waits(facts)]}


def pinned(rows: list[dict[str, Any]], key: str) -> torch.Tensor:
    return torch.tensor([row[key] for row in rows]).pin_memory()


@functools.cache
def of_hand(precision: str, *, accumulation: int = 1, clips: bool = True, adapters: bool = False) -> Found:
    """Counts a loop written by hand with the same model, data, groups of the optimizer and precision.

    As in transformers' Trainer, the loss of a window is divided by its labels, and without clipping the norm is
    measured for the log.
    """
    parts = lora() if adapters else causal()
    model = parts["model"].to("accel")
    model.config.use_cache = False  # as both trainers set it
    groups = make_trainer(Path("unused"), **causal(), use_cpu=True).get_decay_parameter_names(model)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [value for name, value in named.items() if name in groups], "weight_decay": 0.0},
            {"params": [value for name, value in named.items() if name not in groups], "weight_decay": 0.0},
        ],
        lr=1e-2,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    scaler = torch.amp.GradScaler("accel") if precision == "fp16" else None
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    rows = (data.sequences(26) * 40)[: 4 * LAST * accumulation]
    total = torch.zeros((), device="accel")
    model.train()
    for step in range(1, LAST + 1):
        window = []
        for micro_batch in range(accumulation):
            start = 4 * ((step - 1) * accumulation + micro_batch)
            batch = {
                key: pinned(rows[start : start + 4], key).to("accel", non_blocking=True)
                for key in ("input_ids", "labels")
            }
            window.append(batch)
        counts = [batch["labels"][:, 1:].ne(-100).sum(dtype=torch.float32) for batch in window]
        num_items = torch.stack(counts).sum() if accumulation > 1 else counts[0]
        for batch in window:
            with torch.autocast("accel", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(**batch, num_items_in_batch=num_items).loss
            total += loss.detach()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            torch.nn.utils.get_total_norm([value.grad for value in model.parameters() if value.grad is not None])
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if step == FIRST:
            COUNTS.clear()
        elif step == LAST:
            return _found()
    raise AssertionError("unreachable")


def compared(folder: Path, name: str, precision: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the counts of both, and the launches that each has more of than the other."""
    accumulation = FEATURES[name][1].get("gradient_accumulation_steps", 1)
    clips = (FEATURES[name][1] | settings).get("max_grad_norm", 1.0) > 0
    ours = of_trainer(folder, name, precision, **settings)
    hand = of_hand(precision, accumulation=accumulation, clips=clips, adapters=name == "lora")
    mine = Counter(ours["by_name"])
    its = Counter(hand["by_name"])
    return {"ours": ours, "hand": hand, "more": dict(mine - its), "fewer": dict(its - mine)}


def cells(folder: Path, precision: str, names: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns `compared` of each of these features in one precision, with further settings."""
    return {name: compared(folder / name, name, precision, settings) for name in names}


def waits_by_optimizer(folder: Path, names: list[str]) -> dict[str, Any]:
    """Returns for each optimizer how often the host waits in a step, beyond the loop by hand, and what is said."""
    hand = of_hand("fp32")
    found = {}
    for name in names:
        ours = of_trainer(folder / name, "plain", "fp32", optim=name)
        more = sum(ours["waits"].values()) - sum(hand["waits"].values())
        found[name] = {"waits": more / (LAST - FIRST), "said": ours["said"]}
    return found
