"""Accelerator of a trainer: made here for every engine, with loss scaling, TF32, fp8 recipes and loader settings.

The process group is started by `distributed/process_group.py`, or by accelerate with the options from here.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any  # Any: accelerate is imported where it is used

import torch

from trainwright.config.plans import EnginePlan, ParallelPlan
from trainwright.distributed.device import get_kind, tf32_switches
from trainwright.distributed.process_group import init_method, start_alone
from trainwright.errors import ArgumentError, MissingPackageError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils.dataclasses import GradientAccumulationPlugin, KwargsHandler

# Accelerate notes in the environment which plugin it got; the next trainer of this process may have none.
PLUGIN_VARIABLES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING")
SIZES_VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"


def make_accelerator(plan: EnginePlan, *, cpu: bool | None = None, **plugins: object) -> Accelerator:
    """Makes the Accelerator of this process, with the process group that exists, or starts one.

    For fp16 it has a gradient scaler, also on a device for which accelerate has none. `cpu` makes accelerate use the
    CPU alone, by default as the plan does; `plugins` is accelerate's plugin of a backend. An existing state of
    accelerate that does not fit is an error, and so is fp8 without a package that has a recipe.
    """
    from accelerate import Accelerator, DataLoaderConfiguration

    # Accelerate keeps one state per process; a second trainer may have another precision or device.
    if plan.keeps_state:
        _check_state(plan, has_plugins=bool(plugins))
    else:
        forget_state()
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
    kind = torch.device(plan.device).type
    scales_here = mixed == "fp16" and not get_kind(kind).accelerate_scales
    num_steps = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"))  # set by `accelerate launch`
    handlers = [*_handlers(plan, in_group=is_among_others or bool(plugins))]
    with _without_variables(), _missing_recipe_explained(mixed):
        accelerator = Accelerator(
            mixed_precision="no" if scales_here else mixed,
            cpu=cpu,
            dataloader_config=DataLoaderConfiguration(**asdict(plan.loaders)),
            kwargs_handlers=handlers,
            gradient_accumulation_plugin=_accumulation()(num_steps=num_steps),
            **plugins,
        )
    if plan.parallel is not None:
        _set_sizes(accelerator, plan.parallel)
    if scales_here:
        accelerator.scaler = torch.amp.GradScaler(kind)
    if plan.precision.tf32 is not None:
        for owner, name in tf32_switches():
            setattr(owner, name, plan.precision.tf32)
    return accelerator


def has_state() -> bool:
    """Returns True if accelerate has a state of this process already; making a `PartialState` would make one."""
    from accelerate.state import PartialState

    return bool(object.__new__(PartialState).initialized)


def forget_state() -> None:
    """Clears accelerate's state of this process, which all instances of its two classes share as their attributes."""
    from accelerate.state import AcceleratorState, PartialState, is_initialized

    if is_initialized():
        vars(AcceleratorState()).clear()
    if has_state():
        vars(PartialState()).clear()


def _check_state(plan: EnginePlan, *, has_plugins: bool) -> None:
    """Raises ArgumentError where accelerate's state, made before and not to be changed, does not fit the plan."""
    from accelerate.state import AcceleratorState, PartialState, is_initialized

    asks = "accelerator_config.use_configured_state=True"
    if not has_state():
        raise ArgumentError(
            f"{asks} takes the state that was made before, and there is none. Make one first, "
            "accelerate.PartialState() or Accelerator(), or leave the setting out."
        )
    there = PartialState()
    wanted = torch.device(plan.device).type
    if there.device.type != wanted:
        raise ArgumentError(f"{asks}: the state is on {there.device.type}, and the arguments ask for {wanted}.")
    if not is_initialized():
        return
    mixed = AcceleratorState().mixed_precision
    asked = plan.precision.mixed
    if mixed != asked and not (asked == "fp16" and not get_kind(wanted).accelerate_scales):  # there we scale ourselves
        raise ArgumentError(
            f"{asks}: the state has mixed_precision={mixed!r}, and the arguments come to {asked!r}. Make the "
            "Accelerator with the same, or only a PartialState()."
        )
    if has_plugins:
        raise ArgumentError(
            f"{asks}: the state of an Accelerator keeps its own plugins, and fsdp or deepspeed is asked for here. "
            "Make only a PartialState()."
        )


def make_sizes(sizes: Mapping[str, int]) -> Any:
    """Returns accelerate's ParallelismConfig of sizes, by the names of its fields."""
    from accelerate import ParallelismConfig

    return ParallelismConfig(**sizes)


def _set_sizes(accelerator: Accelerator, plan: ParallelPlan) -> None:
    """Sets accelerate's ParallelismConfig. Afterwards, since its constructor refuses groups on the CPU."""
    from accelerate import ParallelismConfig

    sizes = {f"{name}_size": getattr(plan, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    config = plan.given or ParallelismConfig(**({} if plan.num_per_sequence > 1 else sizes))
    if plan.num_per_sequence > 1:
        config = copy(config)  # accelerate refuses copies of whole models that share sequences, so not by `replace`
        for name, size in sizes.items():
            setattr(config, name, size)
    elif any(getattr(config, name) != size for name, size in sizes.items()):
        config = replace(config, **sizes)  # add the sizes that only the model has
    accelerator.state.parallelism_config = config
    if plan.num_in_all > 1 and plan.num_per_sequence == 1:
        accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)


def _handlers(plan: EnginePlan, *, in_group: bool) -> Iterator[KwargsHandler]:
    """Yields accelerate's options for a process group, and for fp8 torchao's recipe if torchao is installed."""
    from accelerate.utils import AORecipeKwargs, DistributedDataParallelKwargs, InitProcessGroupKwargs

    ddp = plan.ddp
    if in_group:
        names = ("bucket_cap_mb", "broadcast_buffers", "static_graph")
        chosen = {name: getattr(ddp, name) for name in names if getattr(ddp, name) is not None}
        timeout = timedelta(seconds=ddp.timeout_s)
        yield InitProcessGroupKwargs(backend=ddp.backend, init_method=init_method(), timeout=timeout)
        yield DistributedDataParallelKwargs(**chosen)
    if plan.precision.mixed == "fp8" and importlib.util.find_spec("torchao") is not None:
        from torchao.float8 import Float8LinearConfig

        # The weights stay plain; torchao's default prepares them for sharding.
        yield AORecipeKwargs(config=Float8LinearConfig(enable_fsdp_float8_all_gather=False))


@functools.cache
def _accumulation() -> type[GradientAccumulationPlugin]:
    """Class of accelerate's settings of accumulation that finds differences from its defaults by its fields.

    The original's `to_kwargs` empties the environment of the process for it, and takes longer than all else there.
    """
    from accelerate.utils import GradientAccumulationPlugin

    class Accumulation(GradientAccumulationPlugin):  # type: ignore[misc]
        def to_kwargs(self) -> dict[str, object]:
            values = {field.name: (field.default, getattr(self, field.name)) for field in fields(self)}
            return {name: value for name, (default, value) in values.items() if value != default}

    return Accumulation


@contextmanager
def _without_variables() -> Iterator[None]:
    """Restores accelerate's environment variables at the end."""
    before = {name: os.environ.get(name) for name in (*PLUGIN_VARIABLES, SIZES_VARIABLE)}
    os.environ.pop(SIZES_VARIABLE, None)  # applied by `_set_sizes` instead
    try:
        yield
    finally:
        for name in before:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _missing_recipe_explained(mixed: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, ValueError) as error:
        if mixed != "fp8":
            raise
        raise MissingPackageError(
            f"Mixed precision fp8 was asked for, and accelerate cannot do it: {error} "
            "Install torchao (pip install torchao) or transformer-engine, or use bf16."
        ) from error
