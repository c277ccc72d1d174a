"""FSDP: parameters, gradients and optimizer states are sharded over the processes; version 2 unless 1 is asked for.

Accelerate reads the settings and wraps the model. Gradients are averaged over processes, as in the other engines.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright._types import Optimizer, Prepared, Scheduler
from trainwright.config.plans import EnginePlan
from trainwright.distributed.collectives import background_group
from trainwright.distributed.world import is_true
from trainwright.engine import sharded_state
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT, uncompiled
from trainwright.engine.precision import as_fp32
from trainwright.engine.sharded_base import ShardedEngine, reshard
from trainwright.errors import ArgumentError, ModelError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

TRANSFORMER_WRAP, SIZE_WRAP = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"
FLAGS_OF_VERSION_1 = {"forward_prefetch": False, "use_orig_params": True, "sync_module_states": True}


class FSDPEngine(ShardedEngine):
    """Trains one model that is sharded over several processes.

    Args:
        plan: with the settings of FSDP.
    """

    def __init__(self, plan: EnginePlan) -> None:
        assert plan.fsdp is not None
        plugin = make_plugin(plan.fsdp.settings, on_cpu=torch.device(plan.device).type == "cpu")
        super().__init__(plan, make_accelerator(plan, fsdp_plugin=plugin))
        _shard_on_any_device(self.accelerator, plugin, plan.precision.mixed)
        self._plugin = plugin
        self._is_version_2 = plugin.fsdp_version == 2
        self._hooked: nn.Module | None = None
        if self._scaler is not None and not self._is_version_2:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            # Skips an update if gradients overflowed in any process.
            self._scaler = self.accelerator.scaler = ShardedGradScaler(self.device.type)

    def setup(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Optimizer],
        make_scheduler: Callable[[Optimizer], Scheduler],
    ) -> Prepared:
        check_wrapped_classes(model, self._plugin)
        if self._is_version_2:
            whole = make_optimizer(model)
            with shared_embeddings_in_the_root(model):
                sharded, prepared = self.accelerator.prepare(model, whole)
            optimizer = prepared.optimizer
        else:  # its optimizer works on the sharded parameters from the beginning
            sharded = self._wrap(model)
            optimizer = make_optimizer(model)
        scheduler = make_scheduler(optimizer)
        self._begin(sharded, optimizer)
        self._return_fp32_outputs()
        return Prepared(self._compiled(sharded), optimizer, scheduler)

    def _wrap(self, model: nn.Module) -> nn.Module:
        sharded = self._sharded_of(model)
        if sharded is not None:
            return sharded
        if self._is_version_2:
            from accelerate.utils.fsdp_utils import fsdp2_prepare_model

            with shared_embeddings_in_the_root(model):
                return fsdp2_prepare_model(self.accelerator, model)  # type: ignore[no-any-return]
        return self.accelerator.prepare_model(model)  # type: ignore[no-any-return]

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        check_wrapped_classes(model, self._plugin)
        self._sharded = self._wrap(model)
        self._return_fp32_outputs()
        return self._sharded  # type: ignore[no-any-return]

    def _sharded_of(self, model: nn.Module) -> nn.Module | None:
        is_sharded = self._sharded is not None and self.unwrap(self._sharded) is self.unwrap(model)
        return self._sharded if is_sharded else None

    def _return_fp32_outputs(self) -> None:
        """Has the model return outputs in fp32, as the other engines do in mixed precision."""
        if self._is_version_2 and self._plan.precision.mixed != "no" and self._hooked is not self._sharded:
            self._sharded.register_forward_hook(lambda module, inputs, outputs: as_fp32(outputs))
            self._hooked = self._sharded

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return NO_CONTEXT  # parameters are gathered in the type that the forward pass wants

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        if self._is_version_2 or sync or self._plan.ddp.sync_each_batch:
            return super().accumulate(model, sync=sync)
        return self._sharded.no_sync()  # type: ignore[no-any-return]

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        if self._is_version_2:
            return super().clip(model, max_norm)
        self._unscale()
        return self._sharded.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = uncompiled(model)
        return inner if self._is_version_2 else getattr(inner, "_fsdp_wrapped_module", inner)

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        sharded = self._sharded if self._is_version_2 else None
        if sharded is not None:  # `generate` calls an encoder by itself, whose embeddings belong to the root module
            sharded._get_fsdp_state()._lazy_init()  # what the first forward pass of the whole model does
            sharded.unshard()
        try:
            # A process whose text has ended continues with the others: each forward pass is one of all processes.
            yield {"synced_gpus": True} if self._world_size > 1 else {}
        finally:
            if sharded is not None:
                sharded.reshard()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def writes_parts(self) -> bool:
        return self.holds_parts and "SHARDED" in str(self._plugin.state_dict_type)

    def save_parts(self, folder: Path, optimizer: Optimizer | None, *, put: Callable[..., None]) -> None:
        reshard(self._sharded)
        sharded_state.save(folder, self._sharded, optimizer, put=put, group=background_group())


def make_plugin(settings: Mapping[str, Any] | None, *, on_cpu: bool) -> FullyShardedDataParallelPlugin:
    """Translates settings to accelerate's.

    Args:
        settings: values of `fsdp_config`; None: those of the launcher.
        on_cpu: whether the model is trained on the CPU.

    Returns:
        accelerate's plugin.

    Raises:
        ArgumentError: version 1 on the CPU.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    if settings is None:
        return FullyShardedDataParallelPlugin()
    if int(settings.get("version", 2)) == 1 and on_cpu:
        raise ArgumentError(
            "fsdp_config: version 1 needs GPUs; on the CPU torch dies when it puts its states together. Leave version "
            "out: 2 works on both."
        )
    version, policy = int(settings.get("version", 2)), settings.get("auto_wrap_policy", TRANSFORMER_WRAP)
    chosen: dict[str, Any] = {
        "fsdp_version": version,
        "auto_wrap_policy": policy,
        "cpu_offload": _flag(settings, "cpu_offload", False) and not on_cpu,  # there it is already
        "state_dict_type": settings.get("state_dict_type", "FULL_STATE_DICT"),
        "activation_checkpointing": _flag(settings, "activation_checkpointing", False),
        "cpu_ram_efficient_loading": _flag(settings, "cpu_ram_efficient_loading", False),
    }
    if policy == SIZE_WRAP:
        chosen["min_num_params"] = int(settings.get("min_num_params", 0))
    if policy == TRANSFORMER_WRAP and settings.get("transformer_layer_cls_to_wrap"):
        chosen["transformer_cls_names_to_wrap"] = list(settings["transformer_layer_cls_to_wrap"])
    chosen["reshard_after_forward"] = _resharding(settings, version)
    if version == 1:
        chosen |= {name: _flag(settings, name, default) for name, default in FLAGS_OF_VERSION_1.items()}
        chosen["limit_all_gathers"] = _flag(settings, "limit_all_gathers", True)
        chosen["backward_prefetch"] = str(settings.get("backward_prefetch", "NO_PREFETCH")).upper()
    return FullyShardedDataParallelPlugin(**chosen)


def _resharding(settings: Mapping[str, Any], version: int) -> bool | str:
    if version == 2:
        return _flag(settings, "reshard_after_forward", True)
    return str(settings.get("reshard_after_forward", "full_shard")).upper()


def _flag(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    value = settings.get(name, default)
    return is_true(value) if isinstance(value, str) else bool(value)


def _shard_on_any_device(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin, mixed: str) -> None:
    """Has accelerate shard on the CPU too, and in a group of one process, as torch can."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = accelerator.state
    if state.distributed_type != DistributedType.FSDP:
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = plugin
        if mixed != "no":
            plugin.set_mixed_precision(mixed)
    if state.device.type == "cpu":
        state.device = torch.device("cpu")  # accelerate numbers it by process, and torch wants it without a number
    if mixed != "no" and plugin.fsdp_version == 2:
        from dataclasses import replace

        # What a model computes in fp32, such as its loss, stays so; `_return_fp32_outputs` converts the rest.
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


@contextmanager
def shared_embeddings_in_the_root(model: Any) -> Iterator[None]:
    """Keeps accelerate from sharding the embeddings apart within the context, where other modules share their weight.

    In T5, more modules share it than accelerate looks for, so one weight would be in two shards, which torch refuses.

    Args:
        model: the user's model, perhaps with transformers' methods for its embeddings.
    """
    find: Any = getattr(model, "get_input_embeddings", lambda: None)
    weight = getattr(find(), "weight", None)
    known = (find(), getattr(model, "get_output_embeddings", lambda: None)())
    owners = [one for one in model.modules() if weight is not None and getattr(one, "weight", None) is weight]
    if all(any(owner is one for one in known) for owner in owners):
        yield
        return
    names = ("get_input_embeddings", "get_output_embeddings")
    for name in names:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


def check_wrapped_classes(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> None:
    """Checks that the model has the layers to wrap.

    Args:
        model: the user's model.
        plugin: names their classes.

    Raises:
        ModelError: a class is missing; the message names similar ones.
    """
    names = plugin.transformer_cls_names_to_wrap or ()
    there = {type(module).__name__.removeprefix("FSDP"): None for module in model.modules()}
    for name in [name for name in names if name not in there]:
        near = difflib.get_close_matches(name, there, n=3, cutoff=0.4) or list(there)[:5]
        raise ModelError(
            f"fsdp_config: transformer_layer_cls_to_wrap names {name!r}, and {type(model).__name__} has no such layer. "
            f"Nearest: {', '.join(near)}. Name a class of the model's layers, or leave the setting out."
        )
