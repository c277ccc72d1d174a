"""The laws of engines under a launcher: `processes.py BACKEND...`. It tells what the test beside it judges."""

import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests._support.two_processes import tell
from trainwright.config.plans import DDPPlan, DeepSpeedPlan, EnginePlan, FSDPPlan, ParallelPlan, PrecisionPlan
from trainwright.engine.select import select_engine

WORLD = int(os.environ["WORLD_SIZE"])
RANK = int(os.environ["RANK"])
FEATURES = 5
CLASSES = 3
ROWS = 16


def plan_of(backend: str, mixed: str = "no") -> EnginePlan:
    more: dict[str, Any] = {}
    if backend.startswith("fsdp"):
        more["fsdp"] = FSDPPlan(settings={"reshard_after_forward": backend == "fsdp full_shard"})
    if backend.startswith("tensor"):
        tp = tensor_size(backend)
        more["parallel"] = ParallelPlan(tp=tp, dp_shard=WORLD // tp, in_model=True)
    if backend.startswith("zero"):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.3,
            "zero_optimization": {"stage": int(backend[-1])},
        }
        more["deepspeed"] = DeepSpeedPlan(config=config)
    return EnginePlan(
        device=torch.device("cpu"),
        use_cpu=True,
        world_size=WORLD,
        ddp=DDPPlan(backend="gloo"),
        precision=PrecisionPlan(mixed=mixed),
        **more,
    )


def tensor_size(backend: str) -> int:
    """Processes that share each layer."""
    return {"tensor": WORLD, "tensor + fsdp": WORLD // 2}.get(backend, 1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, CLASSES))


def loaded(backend: str) -> nn.Module:
    """The model as it is given to the engine: for tensor parallelism in parts."""
    model = network()
    tp = tensor_size(backend)
    if not backend.startswith("tensor"):
        return model
    mesh = init_device_mesh("cpu", (WORLD // tp, tp), mesh_dim_names=("data", "tensor"))
    layers = {"0": ColwiseParallel(output_layouts=Replicate()), "3": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh["tensor"], layers)
    if tp < WORLD:
        fully_shard(model, mesh=mesh["data"])
    return model


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1)) * 3, torch.arange(ROWS) % CLASSES


def mine(engine: Any, values: torch.Tensor) -> torch.Tensor:
    return values[engine.replica :: engine.num_replicas]


def prepared(engine: Any, backend: str) -> Any:
    return engine.setup(
        engine.place(loaded(backend)),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )


def window(engine: Any, made: Any, parts: int, scale: float = 1.0) -> None:
    """All rows in so many micro-batches; each replica has its share of them."""
    x, y = (mine(engine, values).chunk(parts) for values in rows())
    for i, (inputs, labels) in enumerate(zip(x, y, strict=True)):
        with engine.accumulate(made.model, sync=i == parts - 1), engine.mixed_precision(made.model):
            logits = made.model(inputs)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") * engine.num_replicas / ROWS
        engine.backward(loss * scale)


def weights(engine: Any, made: Any) -> list[float]:
    engine.begin_epoch(made.model)
    whole = engine.whole_weights(made.model)
    state = engine.unwrap(made.model).state_dict() if whole is None else whole
    return [value for name in sorted(state) for value in state[name].double().flatten().tolist()]


def windows_and_norms(backend: str) -> None:
    for parts in (1, 4):
        engine = select_engine(plan_of(backend))
        made = prepared(engine, backend)
        window(engine, made, parts)
        norm = float(engine.clip(made.model, 0.3))
        applied = engine.step(made.optimizer)
        engine.zero_grad(made.model)
        tell(**{f"{backend}: {parts}": {"norm": norm, "applied": applied, "weights": weights(engine, made)}})


def skipped(backend: str) -> None:
    engine = select_engine(plan_of(backend, "fp16"))
    made = prepared(engine, backend)
    before = weights(engine, made)
    window(engine, made, 1, scale=1e6 if RANK == WORLD - 1 else 1.0)  # in one process alone
    with contextlib.suppress(OverflowError):
        engine.clip(made.model, 0.3)
    applied = engine.step(made.optimizer)
    engine.zero_grad(made.model)
    tell(**{f"{backend}: skipped": {"applied": applied, "same": before == weights(engine, made)}})


def alone() -> dict[str, Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = rows()
    nn.functional.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    state = model.state_dict()
    flat = [value for name in sorted(state) for value in state[name].double().flatten().tolist()]
    return {"norm": norm.item(), "weights": flat}


if __name__ == "__main__":
    tell(alone=alone())
    for backend in sys.argv[1:]:
        windows_and_norms(backend)
        if not backend.startswith(("zero", "tensor")):  # these have no fp16 on the CPU
            skipped(backend)
    if dist.is_initialized():
        dist.barrier()
