"""The Accelerator of a trainer: made here for every engine. The group itself is started and left in `distributed/process_group.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from trainwright.config.plans import EnginePlan, ParallelPlan
from trainwright.distributed.elastic_store import init_method
from trainwright.distributed.process_group import start_alone
from trainwright.engine.accelerate_loader import loader_configuration
from trainwright.engine.fp8 import fp8_explained, fp8_recipes
from trainwright.errors import ArgumentError

# Accelerate writes here which plugin it was given; the next trainer of this process may have none.
MARKS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING")
ASKS_FOR_SIZES = "ACCELERATE_USE_PARALLELISM_CONFIG"


def make_accelerator(plan: EnginePlan, *, cpu: bool | None = None, **plugins: Any) -> Any:
    """An Accelerator for this process, alone or among others; takes the process group that is there, or starts it.

    Args:
        cpu: keeps accelerate off other devices; default: the plan's device is the CPU.
        plugins: accelerate's settings of a backend.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # Accelerate keeps one state per process; a second trainer may have another precision or device.
    if plan.keeps_state:
        _check_state(plan, has_plugins=bool(plugins))
    else:
        AcceleratorState._reset_state(reset_partial_state=True)
    is_among_others = plan.world_size > 1
    if is_among_others or plugins:
        os.environ.update({name: value for name, value in plan.ddp.environment.items() if name not in os.environ})
    if plugins and not is_among_others:
        timeout = timedelta(seconds=plan.ddp.timeout_s)
        start_alone(torch.device(plan.device).type, backend=plan.ddp.backend, timeout=timeout)
    on_cpu = torch.device(plan.device).type == "cpu"
    if cpu is None:
        cpu = on_cpu if is_among_others else plan.use_cpu
    mixed = plan.precision.mixed
    scales_here = mixed == "fp16" and on_cpu  # accelerate has no scaler there
    handlers = [*_of_a_group(plan)] if is_among_others or plugins else []
    with _unmarked(), fp8_explained(mixed):
        accelerator = Accelerator(
            mixed_precision="no" if scales_here else mixed,
            cpu=cpu,
            dataloader_config=loader_configuration(plan.loaders),
            kwargs_handlers=handlers + (fp8_recipes() if mixed == "fp8" else []),
            **plugins,
        )
    if plan.parallel is not None:
        _tell_of_sizes(accelerator, plan.parallel)
    if scales_here:
        accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator


def _check_state(plan: EnginePlan, *, has_plugins: bool) -> None:
    """Whether the state that was made before the trainer is one for these arguments: it cannot be changed.

    Raises:
        ArgumentError: there is none, or it is another one.
    """
    from accelerate.state import AcceleratorState, PartialState

    asks = "accelerator_config.use_configured_state=True"
    if not PartialState._shared_state:
        raise ArgumentError(
            f"{asks} takes the state that was made before, and there is none. Make one first, "
            "accelerate.PartialState() or Accelerator(), or leave the setting out."
        )
    there, wanted = PartialState(), torch.device(plan.device).type
    if there.device.type != wanted:
        raise ArgumentError(f"{asks}: the state is on {there.device.type}, and the arguments ask for {wanted}.")
    if not AcceleratorState._shared_state:
        return
    mixed, asked = AcceleratorState().mixed_precision, plan.precision.mixed
    if mixed != asked and not (asked == "fp16" and wanted == "cpu"):  # where the scaler is ours
        raise ArgumentError(
            f"{asks}: the state has mixed_precision={mixed!r}, and the arguments come to {asked!r}. Make the "
            "Accelerator with the same, or only a PartialState()."
        )
    if has_plugins:
        raise ArgumentError(
            f"{asks}: the state of an Accelerator keeps its own plugins, and fsdp or deepspeed is asked for here. "
            "Make only a PartialState()."
        )


def _tell_of_sizes(accelerator: Any, plan: ParallelPlan) -> None:
    """Who works with whom, as accelerate has it. Told afterwards: its constructor refuses groups on the CPU."""
    from accelerate import ParallelismConfig

    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {f"{name}_size": getattr(plan, name) for name in names}
    config = plan.given
    if config is None:
        config = ParallelismConfig(**sizes)
    elif any(getattr(config, name) != size for name, size in sizes.items()):
        config = replace(config, **sizes)  # what the model said beyond it
    accelerator.state.parallelism_config = config
    if plan.num_in_all > 1:
        accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)


def _of_a_group(plan: EnginePlan) -> Iterator[Any]:
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    ddp = plan.ddp
    names = ("bucket_cap_mb", "broadcast_buffers", "static_graph")
    chosen = {name: getattr(ddp, name) for name in names if getattr(ddp, name) is not None}
    timeout = timedelta(seconds=ddp.timeout_s)
    yield InitProcessGroupKwargs(backend=ddp.backend, init_method=init_method(), timeout=timeout)
    yield DistributedDataParallelKwargs(**chosen)


@contextmanager
def _unmarked() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*MARKS, ASKS_FOR_SIZES)}
    os.environ.pop(ASKS_FOR_SIZES, None)  # `_tell_of_sizes` does what it asks for
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
