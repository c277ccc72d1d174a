"""Processes that update matrices in parts by Muon: `muon_of_parts.py FOLDER`. It tells the differences."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests._support.two_processes import tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainwright.optim.muon import SECTIONS, MatrixMuon

WORLD = int(os.environ["WORLD_SIZE"])
STEPS = 3
# Shapes with rows that 2 and 4 processes have unequal parts of; the last has fewer rows than processes.
MATRICES = [(16, 8), (5, 12), (12, 5), (3, 6)]
SECTIONED: dict[str, Any] = {SECTIONS: (0, [8, 4, 4])}
Make = Callable[[torch.Tensor], torch.Tensor]


def pairs() -> dict[str, tuple[list[tuple[int, ...]], Any, dict[str, Any]]]:
    """Name -> shapes, mesh with placements, settings of the group."""
    one = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    cells: dict[str, Any] = {
        "rows": (MATRICES, (one, [Shard(0)]), {}),
        "columns": (MATRICES, (one, [Shard(1)]), {}),
        "copies": (MATRICES, (one, [Replicate()]), {}),
        "stacks": ([(5, 6, 4), (3, 4, 6), (8, 4, 4)], (one, [Shard(0)]), {}),
        "stacks cut inside": ([(5, 6, 4)], (one, [Shard(1)]), {}),
        "sections": ([(16, 8)], (one, [Shard(0)]), SECTIONED),
        "sections across": ([(16, 8)], (one, [Shard(1)]), SECTIONED),
        "plain momentum": (MATRICES, (one, [Shard(0)]), {"nesterov": False, "adjust_lr_fn": "original"}),
    }
    if WORLD == 4:
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
        cells |= {
            "hybrid": (MATRICES, (two, [Replicate(), Shard(0)]), {}),
            "cut twice": (MATRICES, (two, [Shard(1), Shard(0)]), {}),
            "sections cut twice": ([(16, 8)], (two, [Shard(1), Shard(0)]), SECTIONED),
            "stacks cut twice": ([(8, 6, 4)], (two, [Shard(0), Shard(0)]), {}),
        }
    return cells


def law_of_parts(shapes: list[tuple[int, ...]], layout: Any, settings: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    mesh, placements = layout
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    whole = [nn.Parameter(value.clone()) for value in values]
    parts = [nn.Parameter(distribute_tensor(value.clone(), mesh, placements)) for value in values]
    group = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw", **settings}
    optimizers = [MatrixMuon([{"params": own, **group}]) for own in (whole, parts)]
    calls: list[int] = []
    exchange = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: (calls.append(1), exchange(*args, **kwargs))[1]
    for _ in range(STEPS):
        for mine, other in zip(whole, parts, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = distribute_tensor(mine.grad, mesh, placements)
        for optimizer in optimizers:
            optimizer.step()
    dist.all_to_all_single = exchange
    ends = [part.full_tensor() for part in parts]  # type: ignore[attr-defined]
    return {
        "difference": max(float((a - b).detach().abs().max()) for a, b in zip(whole, ends, strict=True)),
        "moved": min(float((a - b).detach().abs().max()) for a, b in zip(values, ends, strict=True)),
        "exchanges": len(calls) / STEPS,
    }


def law_of_torchs_layouts() -> dict[str, float]:
    """Tensor parallelism and FSDP cut one dimension twice, the second time within the first."""
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    parallelize_module(shared, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(shared, mesh=mesh["fsdp"])
    optimizers = [MatrixMuon([{"params": list(one.parameters())}], lr=0.1) for one in (plain, shared)]
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip((plain, shared), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    ends = [p.full_tensor() for p in shared.parameters()]  # type: ignore[attr-defined]
    return {
        "difference": max(float((a - b).detach().abs().max()) for a, b in zip(plain.parameters(), ends, strict=True)),
        "strided": any(hasattr(one, "split_factor") for p in shared.parameters() for one in p.placements),  # type: ignore[attr-defined]
    }


dist.init_process_group("gloo")
for name, cell in pairs().items():
    tell(**{name: law_of_parts(*cell)})
tell(layouts=law_of_torchs_layouts())
dist.destroy_process_group()
