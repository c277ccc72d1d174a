"""Runs of two processes with a stand-in accelerator each, under DDP; `called` in both processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState

import trainwright

from .._support import standin
from .._support.small import OURS, REFERENCE, Side, data, make_trainer, module, weights, without_clock
from .._support.standin.collectives import BACKEND
from .quiet_limits import FIRST, LAST
from .runs import causal

COUNTS = standin.COUNTS
# The search for unused parameters asks torch for pinned memory in C++, which a backend in Python cannot give.
ON_ACCEL: dict[str, Any] = {"use_cpu": False, "ddp_find_unused_parameters": False}
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "adamw by hand": {"optim": "adamw_torch"},
    "no clipping": {"max_grad_norm": 0.0},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 3},
}


@contextmanager
def accelerate_knows_the_device() -> Iterator[None]:
    """Within it accelerate treats the stand-in as a device that it has a name for; otherwise it starts no DDP on it."""
    known = PartialState._prepare_backend
    PartialState._prepare_backend = lambda *args, **kwargs: (BACKEND, DistributedType.MULTI_XPU)  # type: ignore[method-assign]
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        PartialState._prepare_backend = known  # type: ignore[method-assign]
        AcceleratorState._reset_state(reset_partial_state=True)


def _trained(folder: Path, side: Side, parts: dict[str, Any], settings: dict[str, Any]) -> Any:
    trainer = make_trainer(folder, side=side, **parts, **(ON_ACCEL | {"num_train_epochs": 1} | settings))
    trainer.train()
    assert {value.device.type for value in trainer.model.parameters()} == {"accel"}
    return trainer


def differences(folder: Path, name: str) -> dict[str, Any]:
    """Compares a run with the original's: a Llama, and a module with dropout."""
    settings = ROWS[name]
    found = {}
    for kind in ("llama", "module"):
        sides = []
        for side in (OURS, REFERENCE):
            # Whole windows on both devices: how an epoch's tail is divided is a documented difference.
            parts = causal(48) if kind == "llama" else {"model": module(), "train_dataset": data.vectors(48)}
            if "eval_strategy" in settings:
                parts["eval_dataset"] = data.sequences(8) if kind == "llama" else data.vectors(8)
            if side is OURS:
                trainer = _trained(folder / side.name, side, parts, settings)
            else:
                with accelerate_knows_the_device():
                    trainer = _trained(folder / side.name, side, parts, settings)
            values = {key: value.cpu() for key, value in weights(trainer.model).items()}
            log = without_clock(trainer.state.log_history)
            sides.append((values, [{key: entry.get(key) for key in ("loss", "grad_norm")} for entry in log]))
        (ours, our_log), (theirs, their_log) = sides
        found[kind] = {
            "different": [key for key, value in theirs.items() if not torch.equal(value, ours[key])],
            "logs": None if our_log == their_log else [our_log, their_log],
            "steps": len(our_log),
        }
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """Compares a run with dropout on each device with the same run cut off at step 3 (`runs.resumed`)."""
    shared = Path(os.environ["TOLD_FOLDER"])
    settings = ON_ACCEL | {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(shared / "whole", **settings)
    whole.train()
    checkpoint = shared / "whole" / "checkpoint-3"
    states = sorted(path.name for path in checkpoint.glob("rng_state*"))
    torch.rand(7, device="accel")
    later = make_trainer(shared / "later", **settings)
    later.train(resume_from_checkpoint=str(checkpoint))
    before = weights(whole.model)
    after = weights(later.model)
    return {
        "weight_gap": max((value - after[key]).abs().max().item() for key, value in before.items()),
        "steps": later.state.global_step,
        "states": states,
    }


class Counting(trainwright.TrainerCallback):
    """Counts from the end of one step to the end of a later one."""

    found: dict[str, Any]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == FIRST:
            COUNTS.clear()
        elif state.global_step == LAST:
            self.found = _counted()


def _counted() -> dict[str, Any]:
    return {
        "waits": sum(COUNTS.waits.values()),
        "behind": sum(COUNTS.behind.values()),
        "pageable": COUNTS.pageable,
        "collectives": dict(COUNTS.collectives),
    }


def counted(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the counts of a trainer's steps, and of a loop by hand that sums the labels of both processes too."""
    counting = Counting()
    always = {"max_steps": LAST + 1, "logging_steps": LAST + 1}
    trainer = make_trainer(folder, **causal(80), callbacks=[counting], **(ON_ACCEL | always | settings))
    trainer.train()
    return {"ours": counting.found, "hand": _of_hand()}


def _of_hand() -> dict[str, Any]:
    model = causal()["model"].to("accel")
    model.config.use_cache = False
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    rows = data.sequences(26) * 4
    for step in range(1, LAST + 1):
        part = rows[4 * step : 4 * step + 4]
        batch = {
            key: torch.tensor([row[key] for row in part]).pin_memory().to("accel", non_blocking=True)
            for key in ("input_ids", "labels")
        }
        num_items = (batch["labels"][:, 1:] != -100).sum()
        dist.all_reduce(num_items)
        loss = wrapped(**batch, num_items_in_batch=num_items).loss * 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == FIRST:
            COUNTS.clear()
        elif step == LAST:
            return _counted()
    raise AssertionError("unreachable")
