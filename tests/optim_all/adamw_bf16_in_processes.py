"""Processes that train bfloat16 weights with a rounding: `adamw_bf16_in_processes.py ROUNDING`. It tells what holds."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests._support.two_processes import tell
from tests.optim_all.table import Net, Row, make_trainer

ROUNDING = sys.argv[1]
ROW = Row("adamw_bf16", lr=1e-3, settings={"optim_args": f"rounding={ROUNDING}"})
SETTINGS: dict[str, Any] = {
    "net": lambda: Net(0.2).bfloat16(),
    "per_device_train_batch_size": 2,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
    "use_cpu": True,
}
ENGINES: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2}}}


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


def are_alike(values: dict[str, torch.Tensor]) -> bool:
    """Whether all processes have the same weights."""
    mine = [value.float().sum().item() for value in values.values()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return all(other == mine for other in every)


def outcome(engine: str) -> dict[str, bool]:
    folder = Path(engine).absolute()
    first = make_trainer(folder, ROW, **SETTINGS, **ENGINES[engine])
    before = whole_weights(Net(0.2).bfloat16())
    first.train()
    ended = whole_weights(first.model_wrapped)
    second = make_trainer(folder, ROW, **SETTINGS, **ENGINES[engine])
    second.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return {
        "resumed": are_equal(whole_weights(second.model_wrapped), ended),
        "moved": not are_equal(before, ended),
        "alike": are_alike(ended),
    }


if __name__ == "__main__":
    logging.getLogger("trainwright").setLevel("ERROR")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    for one in ENGINES:
        tell(**{one: outcome(one)})
